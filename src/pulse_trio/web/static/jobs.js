// The list of jobs: one box that selects a whole page, and the number that is selected. Without it each job has its own box.
for (const form of document.querySelectorAll("form[data-select]")) {
  const boxes = [...form.querySelectorAll("input[name=ids]")];
  const place = form.querySelector("th.check");
  const said = form.querySelector("[data-selected]");
  if (!boxes.length || !place || !said) continue;
  const all = document.createElement("input");
  all.type = "checkbox";
  all.setAttribute("aria-label", "Select all jobs of this page");
  place.replaceChildren(all);
  const buttons = form.querySelectorAll("button[name=verb]");
  said.setAttribute("role", "status");
  const show = () => {
    const count = boxes.filter((box) => box.checked).length;
    all.checked = count === boxes.length;
    all.indeterminate = count > 0 && count < boxes.length;
    said.textContent = count ? `${count} selected:` : "Select jobs to act on them:";
    for (const button of buttons) button.disabled = !count;
  };
  all.addEventListener("change", () => {
    for (const box of boxes) box.checked = all.checked;
    show();
  });
  form.addEventListener("change", show);
  addEventListener("pageshow", show);
  show();
}
