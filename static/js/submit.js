// The submit form: errors at each field on blur, a live estimate, one launch per click. All
// validation runs on the server.

import "./base.js";
import * as format from "./lib/format.js";
import { $, $$, h, icon, setText } from "./lib/dom.js";
import { sendOnce, showErrors } from "./lib/forms.js";
import { asker } from "./lib/requests.js";
import { poolRows } from "./submit/pools.js";
import { copyButtons, showBudgets, showChanges, showSweep } from "./submit/preview.js";
import { settingSearch } from "./submit/search.js";

const KEPT = "submit"; // sessionStorage key; base.js removes it on the next page

const SHOW = {
  reduce_plan: String,
  up_bytes_per_round: format.size,
  down_bytes_per_round: format.size,
  total_bytes: format.size,
  exchange_s: format.duration,
  goodput: format.percent,
  usd_h: format.money,
  usd_text: String,
  reduction: (value) => `${value >= 10 ? value.toFixed(0) : value.toFixed(1)}×`,
};

function submitPage() {
  const form = $("[data-submit]");
  const token = form.elements.csrfmiddlewaretoken;
  // If the session expired on submit, the kept input is posted again to fill in the form.
  const kept = sessionStorage.getItem(KEPT);
  sessionStorage.removeItem(KEPT);
  if (kept && form.hasAttribute("data-fresh")) {
    const fields = [...JSON.parse(kept), [token.name, token.value], ["restore", "1"]];
    const inputs = fields.map(([name, value]) => h("input", { type: "hidden", name, value }));
    const again = h("form", { method: "post", hidden: "" }, inputs);
    document.body.append(again);
    again.submit();
    return;
  }
  const panels = $$("[data-estimate]", form);
  const status = $("[data-estimate-state]", form);
  const touched = new Set($$(".errors:not([hidden])", form).map((list) => list.dataset.errorsFor));

  // Fields shown only for some choices.
  function reveal() {
    for (const block of $$("[data-when]", form)) {
      const [name, value] = block.dataset.when.split("=");
      block.hidden = !value.split("|").includes(form.elements[name].value);
    }
  }

  const tested = new Map(); // field -> test result, until the field or its row changes

  function show(all) {
    const errors = { ...all, ...Object.fromEntries(tested) };
    showErrors(form, Object.fromEntries([...touched].map((name) => [name, errors[name]])));
  }

  /** A link to the first wrong field, which can be in a closed section. */
  function toCorrect(names) {
    const [name] = names;
    const onclick = () => {
      touched.add(name);
      show(errorsNow);
    };
    const count = `${names.length} field${names.length === 1 ? "" : "s"} to correct`;
    return h("a", { href: `#id_${name}`, dataset: { go: name }, onclick }, count);
  }

  function showEstimate(estimate, errors) {
    for (const panel of panels) panel.toggleAttribute("data-stale", !estimate);
    status.replaceChildren(estimate ? "" : toCorrect(Object.keys(errors)));
    if (!estimate) return;
    for (const cell of $$("[data-e]", form)) {
      const value = estimate[cell.dataset.e];
      const show = SHOW[cell.dataset.e] ?? format.count;
      const unknown = value === null && show !== format.money;
      setText(cell, unknown ? format.UNKNOWN : show(value));
      const line = cell.closest(".estimate div");
      if (line) line.hidden = unknown; // many figures are unknown for custom code
    }
    rows().forEach((row, i) => {
      const usd = estimate.pool_usd_h[i];
      setText(
        $("[data-pool-cost]", row),
        usd === 0 ? "" : usd === null ? "cost unknown" : `${format.money(usd)}/h`,
      );
    });
    setText($("[data-replicas-total]", form), `${estimate.replicas} in total`);
    const budget = Number(form.elements.budget_usd.value);
    const refused = !!$('[data-errors-for="sweep_budget_usd"]:not([hidden])', form);
    $("[data-over-budget]", form).hidden = !((budget && estimate.usd > budget) || refused);
    $("[data-e-reduction]", form).hidden = estimate.reduction === null;
    setText($("[data-json]", form), estimate.effective_json);
  }

  async function post(address, more = {}) {
    const body = new FormData(form);
    body.delete("archive"); // sent once, with the launch
    for (const [name, value] of Object.entries(more)) body.set(name, value);
    const response = await fetch(address, { method: "POST", body });
    if (!response.ok || response.redirected) throw new Error(String(response.status));
    return response.json();
  }

  /** Keep errors of checks that run only on submit. */
  function keep(names, errors) {
    for (const name of names) {
      if (errors[name] || tested.has(name)) continue;
      tested.set(
        name,
        $$("li", $(`[data-errors-for="${name}"]`, form)).map((item) => item.textContent.trim()),
      );
    }
    return null;
  }

  let errorsNow = {};
  let launchText = "Launch";
  let sending = false;
  let first = [...touched];
  const later = asker(() => post(form.dataset.estimateUrl), (answer) => {
    const { errors, estimate, changes, sweep, command, budgets } = answer;
    errorsNow = errors;
    if (first) first = keep(first, errors);
    show(errors);
    showEstimate(estimate, errors);
    showChanges(form, changes);
    showBudgets(form, budgets);
    if (!estimate) return;
    showSweep(form, sweep);
    setText($("[data-command]", form), command);
    launchText = sweep ? `Launch ${format.count(sweep.runs)} runs` : "Launch";
    if (!sending) label(launchText);
  }, () => setText(status, "server not reachable"));

  const rows = poolRows(form, () => {
    forget("pools.");
    later(0);
  });

  // Test buttons: show the result beside the button and errors at their fields.
  form.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-test]");
    if (!button) return;
    event.preventDefault();
    if (button.hasAttribute("aria-disabled")) return;
    const what = button.value;
    const place = $(`[data-result="${what}"]`, form);
    forget(what);
    button.setAttribute("aria-disabled", "true");
    place.replaceChildren(h("span", {}, "Checking…"));
    try {
      const answer = await post(form.dataset.testUrl, { test: what });
      for (const [name, messages] of Object.entries(answer.errors)) {
        tested.set(name, messages);
        touched.add(name);
      }
      show(errorsNow);
      const text = answer.ok ? answer.message : "See below";
      place.replaceChildren(icon(answer.ok ? "succeeded" : "failed"), h("span", {}, text));
    } catch {
      place.replaceChildren(icon("failed"), h("span", {}, "The server did not respond"));
    }
    place.dataset.ok = String(!!$("use[href$='#succeeded']", place));
    button.removeAttribute("aria-disabled");
  });

  /** Remove a test result after its input changed. */
  function forget(name) {
    const row = name.startsWith("pools.");
    const what = row
      ? name.split(".").slice(0, 2).join(".")
      : name === "store_credential"
        ? "rendezvous"
        : name;
    // A backend change invalidates reachability results; any change can affect the cost.
    const also = row ? ["rendezvous", "data", "budget_usd"] : ["budget_usd"];
    for (const known of [...tested.keys()]) {
      if ([what, name, ...also].includes(known) || known.startsWith(`${what}.`))
        tested.delete(known);
    }
    for (const one of [what, ...also]) $(`[data-result="${one}"]`, form)?.replaceChildren();
  }

  form.addEventListener("input", (event) => {
    forget(event.target.name);
    later(250);
  });
  form.addEventListener("change", (event) => {
    reveal();
    touched.add(event.target.name);
    later(0);
  });
  form.addEventListener("focusout", (event) => {
    if (
      !event.target.name ||
      (event.target.value && event.target.value === event.target.defaultValue)
    )
      return;
    touched.add(event.target.name);
    later(0);
  });

  const launches = $$("[data-launch]", form); // one of them is visible
  const label = (text) => launches.forEach((button) => setText($("span", button), text));
  sendOnce(form, launches, {
    sent({ submitter }) {
      sending = true;
      label(submitter?.name ? "Checking…" : "Launching…");
      const typed = [...new FormData(form)].filter(
        ([name, value]) => typeof value === "string" && name !== token.name,
      );
      sessionStorage.setItem(KEPT, JSON.stringify(typed));
    },
    back() {
      sending = false;
      label(launchText);
      const bytes = crypto.getRandomValues(new Uint8Array(18)); // a new submit key for a new run
      form.elements.submit_key.value = btoa(String.fromCharCode(...bytes))
        .replaceAll("+", "-")
        .replaceAll("/", "_");
    },
  });

  settingSearch(form);
  copyButtons(form);
  reveal();
  later(0);
  $("[data-summary]")?.focus();
}

submitPage();
