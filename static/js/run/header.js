// Run header: title, figures and actions.

import * as format from "../lib/format.js";
import { $, $$, setFraction, setState, setText } from "../lib/dom.js";
import { look, RUN_ENDED, RUN_STOPPABLE } from "../lib/states.js";

export function header({ store, page }) {
  const at = Object.fromEntries($$("[data-s]", page).map((element) => [element.dataset.s, element]));
  const clocks = () => store.run && tick(store.run, at);
  setInterval(clocks, 1000);
  setFraction(at.bar, Number(at.bar.dataset.fraction));
  stopping(store);
  return (changed) => {
    if (!changed.has("run")) return;
    show(store.run, at);
    clocks();
  };
}

function show(run, at) {
  const ended = RUN_ENDED.has(run.state);
  setState(at.state, run.state, "state-l");
  setText(at.why, run.state_reason ?? "");
  setText(at.rounds, format.count(run.committed_rounds));
  setText(at.total, `of ${format.count(run.total_rounds)}`);
  setFraction(at.bar, run.committed_rounds / run.total_rounds, look(run.state).tone);
  setText(at.eval_loss, format.loss(run.eval_loss));
  setText(at.train_loss, format.loss(run.train_loss));
  setText(at.tokens, format.count(run.tokens));
  setText(at.speed, ended || run.tokens_per_s === null ? "" : `${format.count(run.tokens_per_s)} tokens/s`);
  setText(at.live, format.count(run.live));
  setText(at.target, `of ${run.target}`);
  setText(at.quorum, `quorum ${run.quorum}`);
  setText(at.goodput, format.percent(run.goodput));
  setText(at.bytes, format.size(run.bytes_up + run.bytes_down));
  setText(at.bytes_note, `${format.size(run.bytes_up)} ↑  ${format.size(run.bytes_down)} ↓`);
  setText(at.cost, spent(run));
  setText(at.budget, run.budget_usd ? `of ${format.money(run.budget_usd)} budget` : "no budget");
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

function tick(run, at) {
  const begun = run.started_at ?? run.created_at;
  const end = run.ended_at ? Date.parse(run.ended_at) : Date.now();
  setText(at.elapsed, format.elapsed((end - Date.parse(begun)) / 1000));
  setText(at.elapsed_note, run.ended_at ? `ended ${format.clock(run.ended_at)}` : `since ${format.clock(begun)}`);
  // The estimate dates from the last commit and counts down between commits.
  setText(at.eta, RUN_ENDED.has(run.state) || run.eta_s === null ? "" : `about ${format.elapsed(run.eta_s)} left`);
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
      : `No round has been committed yet, so there are no trained weights to keep. The ${replicas} will stop.`;
    setText($("[data-stop-text]", dialog), text);
    const force = $("[name=force][value='1']", dialog);
    force.checked = run.state === "stopping"; // a graceful stop is in progress
    dialog.showModal();
  });
}
