// The submit form: errors at the field as soon as it is left, the estimate beside it, one launch
// per press. The server validates; this only asks it and shows the answer.

import * as format from "./lib/format.js";
import { $, $$, h, icon, setText } from "./lib/dom.js";

const form = $("[data-submit]");
const panel = $("[data-estimate]", form);
const said = $("[data-estimate-state]", form);
const touched = new Set($$(".errors:not([hidden])", form).map((list) => list.dataset.errorsFor));

const SHOW = {
  reduce_plan: String,
  up_bytes_per_round: format.size,
  down_bytes_per_round: format.size,
  total_bytes: format.size,
  reduction: (value) => `${value >= 10 ? value.toFixed(0) : value.toFixed(1)}×`,
};

// Fields that matter only with a certain choice.
function reveal() {
  for (const block of $$("[data-when]", form)) {
    const [name, value] = block.dataset.when.split("=");
    block.hidden = form.elements[name].value !== value;
  }
}

function showErrors(errors) {
  for (const list of $$("[data-errors-for]", form)) {
    const name = list.dataset.errorsFor;
    const messages = touched.has(name) ? (errors[name] ?? []) : [];
    const text = messages.join("\n");
    if ((list.dataset.text ?? list.textContent.trim()) === text) continue;
    list.dataset.text = text;
    list.hidden = !messages.length;
    list.replaceChildren(...messages.map((message) => h("li", {}, icon("failed"), h("span", {}, message))));
    for (const input of [form.elements[name]].flat()) {
      if (!(input instanceof HTMLElement) || input.type === "radio") continue;
      input.toggleAttribute("aria-invalid", messages.length > 0);
      if (messages.length) input.setAttribute("aria-invalid", "true");
      const described = (input.getAttribute("aria-describedby") ?? "").split(" ").filter((id) => id && id !== list.id);
      if (messages.length) described.push(list.id);
      input.setAttribute("aria-describedby", described.join(" "));
    }
  }
}

function showEstimate(estimate, errors) {
  panel.toggleAttribute("data-stale", !estimate);
  const wrong = Object.keys(errors).length;
  setText(said, estimate ? "" : `${wrong} field${wrong === 1 ? "" : "s"} to correct`);
  if (!estimate) return;
  for (const cell of $$("[data-e]", form)) {
    const value = estimate[cell.dataset.e];
    setText(cell, value === null ? format.UNKNOWN : (SHOW[cell.dataset.e] ?? format.count)(value));
  }
  $("[data-e-reduction]", form).hidden = estimate.reduction === null;
  setText($("[data-json]", form), estimate.effective_json);
}

let asked = 0;
async function ask() {
  const mine = ++asked;
  let answer;
  try {
    const response = await fetch(form.dataset.estimateUrl, { method: "POST", body: new FormData(form) });
    if (!response.ok || response.redirected) throw new Error(String(response.status));
    answer = await response.json();
  } catch {
    if (mine === asked) setText(said, "server not reached");
    return;
  }
  if (mine !== asked) return; // a newer question is under way
  showErrors(answer.errors);
  showEstimate(answer.estimate, answer.errors);
}

let timer = 0;
function later(delay) {
  clearTimeout(timer);
  timer = setTimeout(ask, delay);
}

form.addEventListener("input", () => later(250));
form.addEventListener("change", (event) => {
  reveal();
  touched.add(event.target.name);
  later(0);
});
form.addEventListener("focusout", (event) => {
  if (!event.target.name || event.target.value === event.target.defaultValue) return;
  touched.add(event.target.name);
  later(0);
});

const button = $("[data-launch]", form);
let sending = false;
form.addEventListener("submit", (event) => {
  if (sending) event.preventDefault();
  sending = true;
  button.setAttribute("aria-disabled", "true");
  setText($("span", button), "Launching…");
});

// Coming back to a form that was sent is a new intention, so it gets a new key.
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  sending = false;
  button.removeAttribute("aria-disabled");
  setText($("span", button), "Launch");
  const bytes = crypto.getRandomValues(new Uint8Array(18));
  form.elements.submit_key.value = btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_");
});

reveal();
$("[data-summary]")?.focus();
