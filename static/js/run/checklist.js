// Startup checklist before the first round; result card after the end.

import * as format from "../lib/format.js";
import { $, h, icon, setText } from "../lib/dom.js";
import { RUN_ENDED } from "../lib/states.js";

export function checklist({ store }) {
  const card = $("[data-checklist]");
  const list = $("[data-checklist-items]", card);
  const show = () => store.run && draw(store, card, list);
  setInterval(() => !card.hidden && show(), 1000);
  return (changed) => {
    if (changed.has("run") || changed.has("replicas") || changed.has("events")) show();
    if (changed.has("run")) result(store.run);
  };
}

function draw(store, card, list) {
  const { run } = store;
  card.hidden = run.committed_rounds > 0 || RUN_ENDED.has(run.state);
  if (card.hidden) return;
  const replicas = store.replicaRows();
  const begun = Date.parse(run.created_at);
  const rest = replicas.filter((r) => !r.beat_at);
  /** When the run, or its first replica, entered one of these states. */
  const when = (...states) => {
    const entries = [...store.events.values()].filter((event) => states.includes(event.to_state));
    return Math.min(...entries.map((event) => Date.parse(event.at)));
  };
  const status = [...new Set(rest.map((r) => r.backend_state).filter(Boolean))].join(", ");
  const launched = replicas.filter((r) => r.state !== "pending").length;
  const beating = replicas.filter((r) => r.beat_at).length;
  const stepping = replicas.filter((r) => r.step > 0).length;
  const steps = [
    {
      name: "Queued",
      note: "waiting for a worker",
      done: run.state !== "queued",
      at: when("provisioning"),
    },
    {
      name: "Launched",
      note: `${launched} of ${run.target} processes`,
      done: launched >= run.target,
    },
    {
      name: "Image",
      note: status ? `backend status: ${status}` : "the backend is preparing it",
      done: beating > 0 || status.includes("running"),
    },
    {
      name: "First heartbeat",
      note: `${beating} of ${run.target} replicas`,
      done: beating > 0,
      at: when("syncing", "computing"),
    },
    {
      name: "First step",
      note: `${stepping} of ${run.target} training`,
      done: stepping > 0,
    },
    {
      name: "First exchange",
      note: "first committed round",
      done: false,
    },
  ];
  const busy = steps.findIndex((step) => !step.done);
  const elapsed = format.elapsed((Date.now() - begun) / 1000);
  const rows = steps.map((step, i) => {
    const state = step.done ? "done" : i === busy ? "busy" : "todo";
    const symbol = { done: "succeeded", busy: "busy", todo: "todo" }[state];
    const took = Number.isFinite(step.at)
      ? ` after ${format.duration((step.at - begun) / 1000)}`
      : "";
    const words = { done: `done${took}`, busy: `${step.note} · ${elapsed}`, todo: step.note };
    const word = words[state];
    return { state, symbol, name: step.name, word };
  });
  if (list.children.length !== rows.length) {
    list.replaceChildren(
      ...rows.map((row) => h("li", {}, icon("todo"), h("b", {}, row.name), h("span"))),
    );
  }
  rows.forEach((row, i) => {
    const item = list.children[i];
    if (item.dataset.step !== row.state) {
      item.dataset.step = row.state;
      item.firstElementChild.replaceWith(icon(row.symbol));
    }
    setText(item.lastElementChild, row.word);
  });
}

function result(run) {
  const card = $("[data-result]");
  card.hidden = !(RUN_ENDED.has(run.state) && run.state !== "failed" && run.committed_rounds > 0);
  const rounds = format.plural(run.committed_rounds, "round");
  const loss = `evaluation loss ${format.loss(run.eval_loss)}`;
  setText($("[data-result-note]", card), `${rounds}, ${format.count(run.tokens)} tokens, ${loss}`);
}
