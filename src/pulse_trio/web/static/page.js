// Enhances the pages: everything works without it. Regions marked with data-live follow a stream of server-sent events, and
// relative times go on.

const SAY_AFTER = 6000; // milliseconds without a connection until the page says so

// Makes `old` like `now`, changing only what differs: focus, selection, open details and what was typed stay.
function morph(old, now) {
  if (old.nodeType !== now.nodeType || old.nodeName !== now.nodeName || (old.id || now.id) && old.id !== now.id) {
    old.replaceWith(now);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
    return;
  }
  for (const { name, value } of [...now.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    // What the reader opened stays open.
    if (!now.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
  }
  // What a script draws in it is the script's (charts.js).
  if (!old.hasAttribute("data-chart")) morphChildren(old, now);
}

function morphChildren(old, now) {
  const coming = [...now.childNodes];
  // Rows keep their identity by data-key: a row that goes does not make all rows after it others.
  const keyed = new Map();
  for (const child of old.children) if (child.dataset?.key) keyed.set(child.dataset.key, child);
  const wanted = new Set(coming.map((child) => child.dataset?.key));
  wanted.delete(undefined);
  let at = old.firstChild;
  for (const child of coming) {
    const known = child.dataset?.key && keyed.get(child.dataset.key);
    if (known) {
      // What stands before it and does not come again goes, and it stays where it is: an element that is moved loses the focus.
      while (at && at !== known && !wanted.has(at.dataset?.key)) {
        const next = at.nextSibling;
        at.remove();
        at = next;
      }
      if (known !== at) old.insertBefore(known, at);
      else at = at.nextSibling;
      keyed.delete(child.dataset.key);
      morph(known, child);
    } else if (at && !at.dataset?.key && !child.dataset?.key) {
      const next = at.nextSibling;
      morph(at, child);
      at = next;
    } else {
      old.insertBefore(child, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function follow(region) {
  const sign = document.querySelector("[data-pulse]");
  let away;
  const say = (kind, text) => {
    if (!sign) return;
    sign.hidden = false;
    sign.className = `pulse ${kind}`;
    if (sign.textContent !== text) sign.textContent = text;
  };
  const fails = (text) => {
    away ??= setTimeout(() => say("off", text), SAY_AFTER);
  };
  const works = () => {
    clearTimeout(away);
    away = undefined;
    say("on", "Live");
  };
  let source;
  const open = () => {
    source = new EventSource(region.dataset.live);
    source.addEventListener("open", works);
    source.addEventListener("shown", (event) => {
      works();
      const page = new DOMParser().parseFromString(JSON.parse(event.data), "text/html");
      // A parsed page begins without white space: compared with ours, all that follows would be in another place, and new.
      if (region.firstChild?.nodeType === Node.TEXT_NODE && !region.firstChild.nodeValue.trim()) region.firstChild.remove();
      morphChildren(region, page.body);
      tick();
    });
    source.addEventListener("problem", (event) => {
      clearTimeout(away);
      away = undefined;
      say("off", `Not updated: ${JSON.parse(event.data)}`);
    });
    source.addEventListener("error", () => fails("Not updated: no connection"));
  };
  const close = () => source?.close();
  // A page in the background costs the database nothing.
  document.addEventListener("visibilitychange", () => {
    close();
    if (!document.hidden) open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  if (!document.hidden) open();
}

// The same words as text.py's `ago`.
function ago(seconds) {
  const far = Math.abs(seconds);
  let text = `${Math.round(far)} s`;
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (far >= 2 * size) {
      text = `${Math.round(far / size)} ${unit}`;
      break;
    }
  }
  return seconds >= 0 ? `${text} ago` : `in ${text}`;
}

function tick() {
  const now = Date.now();
  for (const time of document.querySelectorAll("time[datetime][data-ago]")) {
    const text = ago((now - Date.parse(time.dateTime)) / 1000 + drift);
    if (time.textContent !== text) time.textContent = text;
  }
}

// The server's clock counts, not the reader's.
const said = document.documentElement.dataset.now;
const drift = said ? (Date.parse(said) - Date.now()) / 1000 : 0;

// On a narrow screen the bar scrolls: the page that is open is to be seen in it.
const here = document.querySelector(".bar [aria-current]");
if (here) here.closest("nav").scrollLeft = here.offsetLeft - 16;

for (const region of document.querySelectorAll("[data-live]")) follow(region);
setInterval(tick, 1000);
