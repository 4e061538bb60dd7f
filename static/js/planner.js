// The planner. Input goes into the address and to the server, which computes the estimate for the
// chosen H and for its neighbours, so moving along the curve needs no request.

import "./base.js";
import * as format from "./lib/format.js";
import { $, $$, h, onTheme, setText } from "./lib/dom.js";
import { showErrors } from "./lib/forms.js";
import { getJSON } from "./lib/live.js";
import { asker } from "./lib/requests.js";
import { planChart } from "./planner/chart.js";

const SHOW = {
  efficiency: format.percent,
  utilisation: format.percent,
  goodput: format.percent,
  wall_s: format.duration,
  compute_s: format.duration,
  exchange_s: format.duration,
  exposed_s: format.duration,
  total_bytes: format.size,
  up_bytes: format.size,
  down_bytes: format.size,
  round_bytes: format.size,
  usd: format.money,
  usd_per_billion_tokens: format.money,
  hardware_usd: format.money,
  bucket_usd: format.money,
  reduce_plan: String,
  reduction: (value) => (value === null ? format.UNKNOWN : `${format.count(value)}× less`),
  enough_mbit_s: (value) =>
    value === null ? "needs lower latency" : `${format.count(value)} Mbit/s`,
};
const COLUMNS = ["utilisation", "goodput", "efficiency", "total_bytes", "wall_s", "usd"];

function plannerPage() {
  const form = $("[data-planner]");
  const out = $("[data-out]", form);
  const announcement = $("[data-announce]", form);
  const best = $("[data-best]", form);

  let plan = null;
  const chart = planChart($("[data-chart]", form), $("[data-legend]", form), choose);

  function show() {
    const values = { ...plan.chosen, enough_mbit_s: plan.enough_mbit_s };
    for (const cell of $$("[data-p]", out)) {
      const name = cell.dataset.p;
      setText(cell, (SHOW[name] ?? format.count)(values[name]));
    }
    best.hidden = plan.best === plan.chosen.sync_every;
    setText($("[data-best-h]", best), String(plan.best));
    chart.draw(plan);
    $("[data-rows]", form).replaceChildren(
      ...plan.curve.map((a) =>
        h(
          "tr",
          { "aria-current": a.sync_every === plan.chosen.sync_every ? "true" : null },
          h("th.num", { scope: "row" }, String(a.sync_every)),
          ...COLUMNS.map((name) => h("td.num", {}, SHOW[name](a[name]))),
        ),
      ),
    );
  }

  /** Select another H of the curve; its values are already loaded. */
  function choose(syncEvery) {
    const estimate = plan?.curve.find((a) => a.sync_every === syncEvery);
    if (!estimate || estimate === plan.chosen) return;
    form.elements.sync_every.value = String(syncEvery);
    plan.chosen = estimate;
    show();
    const { efficiency, total_bytes, usd } = estimate;
    const share = `efficiency ${format.percent(efficiency)}`;
    const cost = `${format.size(total_bytes)} in total, ${format.money(usd)}`;
    setText(announcement, `H ${syncEvery}: ${share}, ${cost}`);
    address();
    later(400);
  }

  const query = () => new URLSearchParams(new FormData(form)).toString();

  function address() {
    history.replaceState(null, "", `${location.pathname}?${query()}`);
  }

  const ask = () => getJSON(`${form.dataset.jsonUrl}?${query()}`);
  const later = asker(
    ask,
    (answer) => {
      out.toggleAttribute("data-stale", !answer.plan);
      showErrors(form, answer.errors);
      if (!answer.plan) return;
      plan = answer.plan;
      plan.chosen = plan.curve.find((a) => a.sync_every === plan.chosen.sync_every);
      const use = $("[data-use]", form);
      if (use) use.href = `${form.dataset.newUrl}?${answer.use}`;
      show();
    },
    () => setText(announcement, "The server did not respond; figures may be out of date."),
  );

  form.addEventListener("input", (event) => {
    // The list price follows the hardware unless the user entered a price.
    if (event.target.name === "hardware") form.elements.usd_h.value = "";
    address();
    later(200);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    later(0);
  });
  best.addEventListener("click", () => choose(plan.best));
  onTheme(() => plan && chart.draw(plan));
  later(0);
}

plannerPage();
