// The replica table. Rows stand in order of their pool and number and never move; ages tick.

import * as format from "../lib/format.js";
import { ACTIONS, h, icon, keyed, setState, setText, table } from "../lib/dom.js";
import { replicaSwatch } from "../lib/palette.js";
import { REPLICA_ENDED, RUN_ENDED } from "../lib/states.js";
import { left } from "../lib/times.js";
import { replicaDialog } from "./actions.js";
import { money } from "./pools.js";

const SHORT = ["state", "backend", "beat", "round", "step", "loss", "speed", "wait", "restarts"];
const LONG = ["state", "phase", "beat", "round", "behind", "step", "loss", "speed", "wait", "gpu", "gpu_memory", "net", "restarts", "attempt", "deadline", "cost", "device"];
const TITLE = {
  state: "State", backend: "Backend", phase: "Backend says", beat: "Last beat", round: "Round", step: "Step",
  loss: "Loss", speed: "Tokens/s", wait: "Waiting", gpu: "GPU", gpu_memory: "GPU memory", net: "Network", restarts: "Failures", device: "Device",
  attempt: "Attempt", deadline: "Deadline", cost: "Cost", behind: "Stale",
};
const NUMERIC = new Set(["beat", "round", "step", "loss", "speed", "wait", "restarts", "attempt", "deadline", "cost", "behind", "gpu", "gpu_memory", "net"]);
const HINT = {
  beat: "How long ago we saw the lease change",
  wait: "Time spent waiting for others, as a share of wall time",
  gpu: "How busy the driver says it is",
  net: "Bytes of the newest round to and from the bucket, over the seconds in which they were moved",
  backend: "What the backend says of the job, not what we conclude",
  phase: "What the backend says of the job, not what we conclude",
  restarts: "Failures in a row that were answered with a relaunch",
  attempt: "How many jobs it has had",
  behind: "Rounds committed since the one it works on was opened",
  deadline: "When the backend will end the job; before that the replica goes on in a new one",
};
const SHOW = {
  round: (r) => format.count(r.round),
  behind: (r, run) => (REPLICA_ENDED.has(r.state) || !r.round ? format.UNKNOWN : format.count(Math.max(run.committed_rounds + 1 - r.round, 0))),
  step: (r) => format.count(r.step),
  loss: (r) => format.loss(r.loss),
  speed: (r) => (REPLICA_ENDED.has(r.state) ? format.UNKNOWN : format.count(r.tokens_per_s)),
  wait: (r) => format.percent(r.wait_fraction),
  gpu: (r) => format.percent(r.gpu_busy),
  gpu_memory: (r) => format.size(r.gpu_memory_bytes),
  net: (r) => [[r.up_bytes_per_s, "↑"], [r.down_bytes_per_s, "↓"]].filter(([rate]) => rate).map(([rate, way]) => `${format.size(rate)}/s ${way}`).join("  ") || format.UNKNOWN,
  restarts: (r) => format.count(r.restarts),
  attempt: (r) => (r.attempt ? format.count(r.attempt) : format.UNKNOWN),
  deadline: (r) => (r.deadline_at ? left(r.deadline_at) : format.UNKNOWN),
  cost: (r) => money(r),
  backend: (r) => (r.backend_state ? `${r.backend}: ${r.backend_state}` : r.backend),
  phase: (r) => r.backend_state || format.UNKNOWN,
  device: (r) => r.device || format.UNKNOWN,
};

export function replicaTable(context, place) {
  const { store, page } = context;
  const long = place.dataset.replicas === "long";
  const columns = long ? LONG : SHORT;
  const ask = long && "mayOperate" in page.dataset ? replicaDialog() : null;
  const body = h("tbody");
  const heads = columns.map((c) => h(NUMERIC.has(c) ? "th.num" : "th", { scope: "col", title: HINT[c] }, TITLE[c]));
  place.append(table("table.replicas", "Replicas of this run", ["Replica", ...heads, ...(ask ? [ACTIONS()] : [])], body));
  const width = columns.length + (ask ? 2 : 1);
  const show = () =>
    keyed(body, rowsOf(context, long), (row) => (row.number === undefined ? `pool${row.id}` : row.number),
      (row) => (row.number === undefined ? group(width) : make(row, columns, page, ask && (() => act(row.number)))),
      (tr, row) => (row.number === undefined ? setText(tr.querySelector("span"), groupText(row)) : update(tr, row, columns, store.run)));
  const act = (number) => (what) =>
    ask(what, number, `${address(page, number)}${what}`, { run: store.run, replica: store.replicas.get(number) });
  setInterval(() => place.offsetParent && [...body.children].forEach((row) => tick(row, store.replicas.get(Number(row.dataset.key)))), 1000);
  return (changed) => {
    if (changed.has("replicas") || (long && (changed.has("pools") || changed.has("run")))) show();
  };
}

/** Of several pools each one's replicas stand under its name; a chosen pool's stand alone. */
function rowsOf({ store, pool }, long) {
  const replicas = store.replicaRows();
  if (!long || store.pools.size < 2) return replicas;
  if (store.pools.has(pool)) return replicas.filter((r) => r.pool === pool);
  return store.poolRows().flatMap((one) => [one, ...replicas.filter((r) => r.pool === one.id)]);
}

const address = (page, number) => page.dataset.replica.replace(/0\/$/, `${number}/`);

function group(width) {
  return h("tr.group", {}, h("th", { scope: "rowgroup", colspan: width }, h("span")));
}

function groupText(pool) {
  return [pool.name, pool.region, pool.spot ? "spot" : "", `${pool.live} of ${pool.wanted} live`].filter(Boolean).join(" · ");
}

function make(replica, columns, page, act) {
  const number = replica.number;
  const button = (what, symbol, text) =>
    h("button.btn.btn-s.btn-quiet", { type: "button", "aria-label": `${text} replica ${number}`, title: text, dataset: { what }, onclick: () => act()(what) }, icon(symbol));
  return h("tr", {},
    h("th", { scope: "row" },
      h("a.replica-name", { href: address(page, number) }, replicaSwatch(number), `Replica ${number}`)),
    ...columns.map((c) => {
      if (c === "state") return h("td.c-state", { dataset: { c } }, h("span"), h("span.why"));
      const name = `td${NUMERIC.has(c) ? ".num" : ""}${c === "beat" || c === "deadline" ? "." + c : ""}`;
      return h(name, { dataset: { c, label: TITLE[c] } });
    }),
    act ? h("td.c-act", {}, button("restart", "restarting", "Restart"), button("stop", "stop", "Stop")) : null);
}

function update(row, replica, columns, run) {
  for (const cell of row.querySelectorAll("[data-c]")) {
    const c = cell.dataset.c;
    if (c === "state") {
      setState(cell.firstElementChild, replica.state);
      setText(cell.lastElementChild, replica.state_reason ?? "");
      cell.lastElementChild.title = replica.state_reason ?? "";
      cell.lastElementChild.hidden = !replica.state_reason;
    } else if (c !== "beat") setText(cell, SHOW[c](replica, run));
  }
  const over = RUN_ENDED.has(run.state) || run.state === "stopping";
  for (const button of row.querySelectorAll("[data-what]")) {
    button.disabled = over || (button.dataset.what === "stop" ? REPLICA_ENDED.has(replica.state) : replica.state === "done");
  }
  tick(row, replica);
}

function tick(row, replica) {
  if (!replica) return;
  const deadline = row.querySelector('[data-c="deadline"]');
  if (deadline && replica.deadline_at) setText(deadline, left(replica.deadline_at));
  const cell = row.querySelector('[data-c="beat"]');
  if (!cell) return;
  const seconds = format.secondsSince(replica.beat_at);
  setText(cell, seconds === null ? format.UNKNOWN : seconds < 2 ? "now" : `${format.age(seconds)} ago`);
  const late = seconds !== null && !REPLICA_ENDED.has(replica.state) && seconds > 3 * (replica.beat_interval_s ?? 5);
  cell.toggleAttribute("data-late", late);
  cell.title = late ? "three beats missed" : "";
}
