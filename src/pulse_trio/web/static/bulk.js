// Acts on many jobs step by step, and shows how far it has come. Without this the form does the same in one long request.
const form = document.querySelector("form[data-bulk]");
const region = document.querySelector("[data-bulk-progress]");

async function step(plan) {
  const body = new URLSearchParams(new FormData(form));
  body.set("plan", plan);
  const answer = await fetch(form.action, { method: "POST", body, headers: { accept: "application/json" } });
  if (answer.redirected) return { location: answer.url };
  if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
  return answer.json();
}

async function all() {
  const bar = region.querySelector("progress");
  const line = region.querySelector("[role=status]");
  const total = Number(bar.max).toLocaleString();
  let plan = form.elements.plan.value;
  form.hidden = true;
  region.hidden = false;
  line.textContent = `0 of ${total}`;
  try {
    for (;;) {
      const found = await step(plan);
      if (found.location) {
        location.assign(found.location);
        return;
      }
      plan = found.plan;
      form.elements.plan.value = plan;
      bar.value = found.done;
      line.textContent = `${found.done.toLocaleString()} of ${total} ${found.past}`;
    }
  } catch (error) {
    // The rest is still planned: the button goes on with it, if the last step was not done. What was done stays done.
    line.textContent = `${line.textContent}. ${error.message} Look at the jobs before you go on.`;
    form.hidden = false;
  }
}

if (form && region) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    all();
  });
}
