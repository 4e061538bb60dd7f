// Run header: title, figures and actions.

import { isStale, isWorkerSilent } from "../lib/banners.js";
import * as format from "../lib/format.js";
import { $, $$, firstLine, setFraction, setState, setText } from "../lib/dom.js";
import { look, RUN_ENDED, RUN_STOPPABLE } from "../lib/states.js";

export function header({ store, page }) {
  const at = Object.fromEntries(
    $$("[data-s]", page).map((element) => [element.dataset.s, element]),
  );
  const clocks = () => store.run && tick(store.run, at);
  setInterval(clocks, 1000);
  setFraction(at.bar, Number(at.bar.dataset.fraction));
  stopping(store);
  return (changed) => {
    if (!changed.has("run")) return;
    show(store.run, at);
    showAlerts(store.run.alerts ?? 0, $("[data-alert-count]", page));
    clocks();
  };
}

/** The number of unacknowledged alerts beside the Activity tab. */
function showAlerts(count, badge) {
  badge.hidden = count === 0;
  setText($("[data-n]", badge), String(count));
  badge.closest("a").title = count ? `${count} unacknowledged` : "";
}

function show(run, at) {
  setState(at.state, run.state);
  const reason = run.state_reason ?? "";
  setText(at.why, run.state === "failed" ? "" : firstLine(reason)); // the failure card shows it
  at.why.title = at.state.title = reason;
  setText(at.rounds, format.count(run.committed_rounds));
  setText(at.total, `of ${format.count(run.total_rounds)}`);
  setFraction(at.bar, run.committed_rounds / run.total_rounds, look(run.state).tone);
  setText(at.eval_loss, format.loss(run.eval_loss));
  setText(at.train_loss, format.loss(run.train_loss));
  setText(at.tokens, format.count(run.tokens));
  setText(at.live, format.count(run.live));
  setText(at.target, `of ${run.target}`);
  setText(at.quorum, `quorum ${run.quorum}`);
  setText(at.goodput, format.percent(run.goodput));
  setText(at.bytes, format.size(run.bytes_up + run.bytes_down));
  setText(at.bytes_note, `${format.size(run.bytes_up)} ↑  ${format.size(run.bytes_down)} ↓`);
  setText(at.cost, spent(run));
  setText(
    at.budget,
    run.budget_usd
      ? `of ${format.money(run.budget_usd)} budget`
      : spent(run) === "unknown"
        ? "cost"
        : "spent",
  );
  const over = run.budget_usd ? run.cost_usd / run.budget_usd : 0;
  at.cost_bar.hidden = !run.budget_usd;
  setFraction(at.cost_bar, over, over >= 1 ? "failed" : over >= 0.8 ? "warning" : "running");
  const stop = $("[data-stop]");
  if (stop) stop.hidden = !RUN_STOPPABLE.has(run.state) && run.state !== "stopping";
  for (const part of $$("[data-in]")) part.hidden = !part.dataset.in.split(" ").includes(run.state);
  document.title = `${progress(run)}${run.name} · Archipelago`;
}

const spent = (run) => format.spent(run.cost_usd, run.cost_known);

function progress(run) {
  if (RUN_ENDED.has(run.state)) return `${look(run.state).word} · `;
  return run.committed_rounds ? `${run.committed_rounds}/${run.total_rounds} · ` : "";
}

/** Update the figures that depend on the time. Those that hold only now are hidden once the data
 * are out of date. */
function tick(run, at) {
  const end = run.ended_at ? Date.parse(run.ended_at) : Date.now();
  setText(at.elapsed, format.elapsed((end - Date.parse(run.created_at)) / 1000));
  setText(
    at.elapsed_note,
    run.ended_at ? `ended ${format.clock(run.ended_at)}` : `since ${format.clock(run.created_at)}`,
  );
  at.elapsed_note.title = format.when(run.ended_at ?? run.created_at);
  const ended = RUN_ENDED.has(run.state);
  const stale = isStale(run) || (!ended && isWorkerSilent());
  const known = (value) => !ended && !stale && value !== null && value !== undefined;
  // The estimate dates from the last commit.
  setText(at.eta, known(run.eta_s) ? `${format.elapsed(run.eta_s)} left` : "");
  setText(at.speed, known(run.tokens_per_s) ? `${format.count(run.tokens_per_s)} tokens/s` : "");
  const more = run.usd_h_known ? "" : " +";
  setText(at.rate, known(run.usd_h || null) ? `${format.money(run.usd_h)}/h${more}` : "");
  at.as_of.hidden = !stale || !run.last_seen_at;
  at.as_of.parentElement.toggleAttribute("data-stale", stale);
  if (stale) setText(at.as_of, `As of ${format.ago(format.secondsSince(run.last_seen_at))}`);
}

function stopping(store) {
  const form = $("[data-stop-form]");
  const dialog = $("[data-stop-dialog]");
  if (!form) return;
  form.addEventListener("submit", (event) => {
    if (!store.run) return;
    event.preventDefault();
    const run = store.run;
    const replicas = format.plural(run.live, "live replica");
    const rounds = `${run.committed_rounds} of ${run.total_rounds}`;
    const text = run.committed_rounds
      ? `The ${replicas} will stop at the newest committed round, currently ${rounds}.`
      : "No round has been committed yet, so there are no trained weights to keep. " +
        `The ${replicas} will stop.`;
    setText($("[data-stop-text]", dialog), text);
    const force = $("[name=force][value='1']", dialog);
    force.checked = run.state === "stopping"; // a graceful stop is in progress
    dialog.showModal();
  });
}
