// Draws the overview's charts with uPlot, in place of the server's pictures: a pointer, a finger or the arrow keys show the exact
// values of a minute. An element with data-chart holds the figures; page.js changes that attribute and leaves its content alone.
const charts = new Map();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The points without a neighbour, which no line shows.
function alone(plot, series) {
  const values = plot.data[series];
  const is = (at) => values[at] !== null && values[at] !== undefined;
  return values.map((_, at) => at).filter((at) => is(at) && !is(at - 1) && !is(at + 1));
}

function line(name, more) {
  const stroke = () => colour(name);
  return { stroke, width: 1.5, points: { show: true, size: 4, fill: stroke, filter: alone }, ...more };
}

class Chart {
  constructor(place) {
    this.place = place;
    const picture = place.parentElement.querySelector("svg");
    this.box = document.createElement("div");
    this.box.className = "canvas";
    this.box.tabIndex = 0;
    // A slider over the minutes: what assistive technology reads, value by value.
    this.box.setAttribute("role", "slider");
    this.box.setAttribute("aria-label", picture.getAttribute("aria-label"));
    this.told = document.createElement("div");
    this.told.className = "told";
    this.told.hidden = true;
    this.told.setAttribute("aria-hidden", "true");
    const { width, height } = picture.getBoundingClientRect();
    this.figures = JSON.parse(place.dataset.chart);
    place.append(this.box, this.told);
    this.plot = new uPlot(this.options(width, height), this.data(), this.box);
    this.say(null);
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("blur", () => this.plot.setCursor({ left: -10, top: -10 }));
    this.sized = new ResizeObserver(() => {
      if (this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height });
    });
    this.sized.observe(this.box);
  }

  options(width, height) {
    const series = [{}, line("--accent", { fill: () => colour("--accent-soft") })];
    if (this.figures.lines.length > 1) series.push(line("--line-strong", { dash: [3, 3] }));
    return {
      width,
      height,
      padding: [0, 0, 0, 0],
      legend: { show: false },
      axes: [{ show: false }, { show: false }],
      cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { size: 7, width: 0 } },
      scales: {
        x: { time: false, range: (_, first, last) => [first, Math.max(last, first + 1)] },
        // As high as the server draws it.
        y: { range: () => [0, this.figures.top / 0.96] },
      },
      series,
      hooks: { setCursor: [(plot) => this.say(plot.cursor.left >= 0 ? plot.cursor.idx : null)] },
    };
  }

  data() {
    const minutes = this.figures.told.length;
    return [[...Array(minutes).keys()], ...this.figures.lines];
  }

  update() {
    this.figures = JSON.parse(this.place.dataset.chart);
    this.plot.setData(this.data());
    this.say(this.plot.cursor.left >= 0 ? this.plot.cursor.idx : null);
  }

  // The minute under the pointer; null: none, and assistive technology hears of the last one.
  say(at) {
    const last = this.figures.told.length - 1;
    const minute = Math.min(at ?? last, last);
    const [time, ...values] = this.figures.told[minute];
    this.box.setAttribute("aria-valuemin", "0");
    this.box.setAttribute("aria-valuemax", String(last));
    this.box.setAttribute("aria-valuenow", String(minute));
    this.box.setAttribute("aria-valuetext", [time, ...values].join(", "));
    this.told.hidden = at === null || at === undefined;
    if (this.told.hidden) return;
    const rows = [time, ...values].map((text) => {
      const row = document.createElement("div");
      row.textContent = text;
      return row;
    });
    this.told.replaceChildren(...rows);
    const room = this.place.clientWidth - this.told.offsetWidth;
    const left = this.plot.valToPos(minute, "x") - this.told.offsetWidth / 2;
    this.told.style.transform = `translateX(${Math.round(Math.max(0, Math.min(room, left)))}px)`;
  }

  move(event) {
    const last = this.figures.told.length - 1;
    const at = this.plot.cursor.left >= 0 ? this.plot.cursor.idx : last + 1;
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.plot.setCursor({ left: this.plot.valToPos(Math.max(0, Math.min(last, to)), "x"), top: 1 });
  }

  end() {
    this.sized.disconnect();
    this.plot.destroy();
  }
}

function draw() {
  for (const [place, chart] of charts) {
    if (place.isConnected) continue;
    chart.end();
    charts.delete(place);
  }
  for (const place of document.querySelectorAll("[data-chart]")) {
    if (!charts.has(place)) charts.set(place, new Chart(place));
  }
}

function changed(records) {
  draw();
  for (const { type, target } of records) if (type === "attributes") charts.get(target)?.update();
}

const region = document.querySelector("[data-live]");
if (region && globalThis.uPlot) {
  draw();
  new MutationObserver(changed).observe(region, { childList: true, subtree: true, attributeFilter: ["data-chart"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of charts.values()) chart.plot.redraw(false);
  });
}
