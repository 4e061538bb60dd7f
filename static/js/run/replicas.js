// The replica table. Rows stand in order of their number and never move; beat ages tick.

import * as format from "../lib/format.js";
import { h, keyed, setState, setText } from "../lib/dom.js";
import { replicaSwatch } from "../lib/palette.js";
import { REPLICA_ENDED } from "../lib/states.js";

const SHORT = ["state", "backend", "beat", "round", "step", "loss", "speed", "wait", "restarts"];
const LONG = ["state", "backend", "beat", "round", "step", "tokens", "loss", "speed", "wait", "restarts", "device", "host", "incarnation"];
const TITLE = {
  state: "State", backend: "Backend", beat: "Last beat", round: "Round", step: "Step", tokens: "Tokens",
  loss: "Loss", speed: "Tokens/s", wait: "Waiting", restarts: "Restarts", device: "Device", host: "Host",
  incarnation: "Incarnation",
};
const NUMERIC = new Set(["beat", "round", "step", "tokens", "loss", "speed", "wait", "restarts"]);
const HINT = {
  beat: "How long ago we saw the lease change",
  wait: "Time spent waiting for others, as a share of wall time",
  backend: "What the backend says of the job, not what we conclude",
};
const SHOW = {
  round: (r) => format.count(r.round),
  step: (r) => format.count(r.step),
  tokens: (r) => format.count(r.tokens),
  loss: (r) => format.loss(r.loss),
  speed: (r) => (REPLICA_ENDED.has(r.state) ? format.UNKNOWN : format.count(r.tokens_per_s)),
  wait: (r) => format.percent(r.wait_fraction),
  restarts: (r) => format.count(r.restarts),
  backend: (r) => (r.backend_state ? `${r.backend}: ${r.backend_state}` : r.backend),
  device: (r) => r.device || format.UNKNOWN,
  host: (r) => r.host || format.UNKNOWN,
  incarnation: (r) => r.incarnation || format.UNKNOWN,
};

export function replicaTable({ store }, place) {
  const columns = place.dataset.replicas === "long" ? LONG : SHORT;
  const body = h("tbody", { role: "rowgroup" });
  place.append(
    h("table.replicas", { role: "table" },
      h("caption.visually-hidden", {}, "Replicas of this run"),
      h("thead", { role: "rowgroup" },
        h("tr", { role: "row" },
          h("th", { scope: "col", role: "columnheader" }, "Replica"),
          ...columns.map((c) => h(`th${NUMERIC.has(c) ? ".num" : ""}`, { scope: "col", role: "columnheader", title: HINT[c] }, TITLE[c])))),
      body));
  const show = () => keyed(body, store.replicaRows(), (r) => r.number, (r) => make(r, columns), (row, r) => update(row, r, columns));
  setInterval(() => place.offsetParent && [...body.children].forEach((row) => beat(row, store.replicas.get(Number(row.dataset.key)))), 1000);
  return (changed) => {
    if (changed.has("replicas")) show();
  };
}

function make(replica, columns) {
  return h("tr", { role: "row" },
    h("th", { scope: "row", role: "rowheader" }, h("span.replica-name", {}, replicaSwatch(replica.number), `Replica ${replica.number}`)),
    ...columns.map((c) => {
      if (c === "state") return h("td.c-state", { role: "cell", dataset: { c } }, h("span"), h("span.why"));
      const name = `td${NUMERIC.has(c) ? ".num" : ""}${c === "beat" ? ".beat" : ""}${c === "incarnation" ? ".mono" : ""}`;
      return h(name, { role: "cell", dataset: { c, label: TITLE[c] } });
    }));
}

function update(row, replica, columns) {
  for (const cell of row.querySelectorAll("[data-c]")) {
    const c = cell.dataset.c;
    if (c === "state") {
      setState(cell.firstElementChild, replica.state);
      setText(cell.lastElementChild, replica.state_reason ?? "");
      cell.lastElementChild.title = replica.state_reason ?? "";
      cell.lastElementChild.hidden = !replica.state_reason;
    } else if (c !== "beat") setText(cell, SHOW[c](replica));
  }
  beat(row, replica);
}

function beat(row, replica) {
  const cell = row.querySelector('[data-c="beat"]');
  if (!replica || !cell) return;
  const seconds = format.secondsSince(replica.beat_at);
  setText(cell, seconds === null ? format.UNKNOWN : seconds < 2 ? "now" : `${format.age(seconds)} ago`);
  const late = seconds !== null && !REPLICA_ENDED.has(replica.state) && seconds > 3 * (replica.beat_interval_s ?? 5);
  cell.toggleAttribute("data-late", late);
  cell.title = late ? "three beats missed" : "";
}
