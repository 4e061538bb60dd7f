// What a launch would do, beside the estimate: the fields that a clone changes, the runs of a
// sweep, and the same request as JSON or as a command line.

import * as format from "../lib/format.js";
import { $, $$, h, setFraction, setText } from "../lib/dom.js";

export function showChanges(form, changes) {
  const part = $("[data-changes]", form);
  if (!part || !changes) return;
  const run = $("caption", part).textContent.replace("Fields changed from ", "");
  const title = changes.length ? `Changed from ${run}` : "Nothing changed yet";
  setText($("[data-changes-title]", part), title);
  $("table", part).hidden = !changes.length;
  $("[data-changes-rows]", part).replaceChildren(...changes.map(({ input, label, before, after }) =>
    h("tr", {},
      h("th", { scope: "row" }, h("a", { href: `#id_${input}`, dataset: { go: input } }, label)),
      h("td", {}, h("del", {}, before)),
      h("td", {}, after))));
}

/** The budgets of the owner and the tags, as the server renders them; undefined: unchanged. */
export function showBudgets(form, html) {
  if (html === undefined) return;
  const part = $("[data-budgets]", form);
  part.innerHTML = html;
  for (const bar of $$("[data-fraction]", part)) setFraction(bar, Number(bar.dataset.fraction));
}

export function showSweep(form, sweep) {
  for (const part of $$("[data-sweep]", form)) part.hidden = !sweep;
  if (!sweep) return;
  setText($("[data-sweep-runs]", form), format.count(sweep.runs));
  setText($("[data-sweep-fields]", form), sweep.fields);
  setText($("[data-sweep-usd]", form), sweep.usd_text);
}

/** Buttons that copy; browsers offer the clipboard on HTTPS and on this machine only. */
export function copyButtons(form) {
  const buttons = $("[data-copies]", form);
  if (!navigator.clipboard) return;
  buttons.hidden = false;
  buttons.addEventListener("click", async ({ target }) => {
    const { copy } = target.dataset;
    if (!copy) return;
    const written = navigator.clipboard.writeText($(`[data-${copy}]`, form).textContent);
    const refused = "The browser refused; select the text below";
    setText($("[data-copied]", buttons), await written.then(() => "Copied", () => refused));
  });
}
