// The replica table. Rows are sorted by pool and number and never move.

import * as format from "../lib/format.js";
import {
  ACTIONS,
  firstLine,
  h,
  icon,
  isShown,
  keyed,
  setState,
  setText,
  table,
} from "../lib/dom.js";
import { isOld, isStale } from "../lib/banners.js";
import { replicaSwatch } from "../lib/palette.js";
import { REPLICA_ENDED, REPLICA_WORKING, RUN_ENDED } from "../lib/states.js";
import { left } from "../lib/times.js";
import { replicaDialog } from "./actions.js";
import { money } from "./pools.js";

/** Columns: of several figures, the first stands above the others. */
const SHORT = [
  "state",
  "backend",
  "beat",
  "round",
  "step",
  "loss",
  "speed",
  "wait",
  "restarts",
].map((c) => [c]);
const LONG = [
  ["state", "phase"],
  ["beat"],
  ["round", "step", "behind"],
  ["loss"],
  ["speed", "wait"],
  ["gpu", "gpu_memory"],
  ["net"],
  ["attempt", "restarts"],
  ["cost", "deadline"],
];
const TITLE = {
  state: "State",
  backend: "Backend",
  beat: "Heartbeat",
  round: "Round",
  step: "Step",
  loss: "Loss",
  speed: "Tokens/s",
  wait: "Waiting",
  gpu: "GPU",
  net: "Network",
  restarts: "Failures",
  attempt: "Attempt",
  cost: "Cost",
};
const TEXTS = new Set(["state", "backend"]); // the other columns are numbers
const HINT = {
  beat: "Time since the last observed heartbeat",
  round: "Round and inner step, and the committed rounds since the replica's round",
  speed: "Tokens per second, and the share of wall time spent waiting for other replicas",
  wait: "Share of wall time spent waiting for other replicas",
  gpu: "GPU utilisation reported by the driver, and memory allocated by torch",
  net: "Bytes of the newest round to and from the bucket, divided by the transfer time",
  backend: "Job status reported by the backend",
  restarts: "Consecutive failures that led to a relaunch",
  attempt: "Number of jobs launched for this replica, and consecutive failures",
  cost: "Cost, and when the backend will end the job; the replica moves to a new job before that",
};
/** Cells of figures that hold only now. */
const PACE = ["speed", "wait", "gpu", "gpu_memory", "net"].map((c) => `[data-c="${c}"]`).join();
const SHOW = {
  round: (r) => format.count(r.round),
  behind: (r, run) => {
    const behind = r.round && !REPLICA_ENDED.has(r.state) ? run.committed_rounds + 1 - r.round : 0;
    return behind > 0 ? `${format.count(behind)} behind` : "";
  },
  step: (r) => format.count(r.step),
  loss: (r) => format.loss(r.loss),
  speed: (r) => (REPLICA_ENDED.has(r.state) ? format.UNKNOWN : format.count(r.tokens_per_s)),
  wait: (r) => format.percent(r.wait_fraction),
  gpu: (r) => format.percent(r.gpu_busy),
  gpu_memory: (r) => format.size(r.gpu_memory_bytes),
  net: (r) => {
    const rates = [[r.up_bytes_per_s, "↑"], [r.down_bytes_per_s, "↓"]].filter(([rate]) => rate);
    return rates.map(([rate, way]) => `${format.size(rate)}/s ${way}`).join("\n") || format.UNKNOWN;
  },
  restarts: (r) => format.count(r.restarts),
  attempt: (r) => (r.attempt ? format.count(r.attempt) : format.UNKNOWN),
  deadline: (r) => (r.deadline_at ? left(r.deadline_at) : ""),
  cost: (r) => money(r),
  backend: (r) => (r.backend_state ? `${r.backend}: ${r.backend_state}` : r.backend),
  phase: (r) => r.backend_state,
  device: (r) => r.device,
};
/** The same figures where they stand below another one, and need a name. */
const BELOW = {
  step: (r) => `step ${format.count(r.step)}`,
  wait: (r) =>
    (r.wait_fraction ?? null) === null ? "" : `${format.percent(r.wait_fraction)} waiting`,
  gpu_memory: (r) => (r.gpu_memory_bytes ? format.size(r.gpu_memory_bytes) : ""),
  restarts: (r) => (r.restarts ? format.plural(r.restarts, "failure") : ""),
};

/** What happened to a replica that has an earlier attempt: "preempted 5 min ago → replaced,
 * training". */
function story(replica) {
  const { last_cause: cause, last_ended_at: at, state } = replica;
  if (!cause || !at || REPLICA_ENDED.has(state)) return "";
  let now = "replacement is starting";
  if (state === "syncing") now = "replaced, catching up";
  else if (REPLICA_WORKING.has(state) || state === "draining") now = "replaced, training again";
  else if (state === "restarting" || state === "pending") now = "waiting for a replacement";
  return `${cause.replaceAll("_", " ")} ${format.ago(format.secondsSince(at))} → ${now}`;
}

const numeric = (column) => (TEXTS.has(column) ? "" : ".num");

const PAGE = 50;

export function replicaTable(context, place) {
  const { store, page } = context;
  const long = place.dataset.replicas === "long";
  const columns = long ? LONG : SHORT;
  const ask = long && "mayOperate" in page.dataset ? replicaDialog() : null;
  const body = h("tbody");
  const heads = columns.map(([c]) =>
    h(`th${numeric(c)}`, { scope: "col", title: HINT[c] }, TITLE[c]),
  );
  if (ask) heads.unshift(ACTIONS());
  let limit = PAGE; // rows of the document; more replicas are a button away
  const more = h("button.btn.btn-s", { type: "button", onclick: () => ((limit += PAGE), show()) });
  const foot = h("p.table-more", { hidden: true }, more);
  place.append(table("table.replicas", "Replicas of this run", ["Replica", ...heads], body), foot);
  const act = (number) => (what) =>
    ask(what, number, `${address(page, number)}${what}`, {
      run: store.run,
      replica: store.replicas.get(number),
    });
  const isPool = (row) => row.number === undefined;
  function show() {
    const all = rowsOf(context, long);
    foot.hidden = all.length <= limit;
    const total = format.plural(store.replicas.size, "replica");
    setText(more, `Show ${Math.min(PAGE, all.length - limit)} more of ${total}`);
    keyed(
      body,
      all.slice(0, limit),
      (row) => (isPool(row) ? `pool${row.id}` : row.number),
      (row) =>
        isPool(row)
          ? group(heads.length + 1)
          : make(row, columns, page, long, ask && act(row.number)),
      (tr, row) => {
        if (isPool(row)) setText(tr.querySelector("span"), groupText(row));
        else update(tr, row, store.run);
      });
  }
  setInterval(() => {
    if (!isShown(place)) return;
    for (const row of body.children)
      tick(row, store.replicas.get(Number(row.dataset.key)), store.run);
  }, 1000);
  return (changed) => {
    if (!store.run || !isShown(place)) return;
    if (
      changed.has("replicas") ||
      changed.has("tab") ||
      (long && (changed.has("pools") || changed.has("run")))
    )
      show();
  };
}

/** Group replicas by pool, or show only those of the selected pool. */
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
  const live = `${pool.live} of ${pool.wanted} live`;
  return [pool.name, pool.region, pool.spot && "spot", live].filter(Boolean).join(" · ");
}

function make(replica, columns, page, long, act) {
  const number = replica.number;
  const button = (what, symbol, text) =>
    h(
      "button.btn.btn-s.btn-quiet",
      {
        type: "button",
        title: text,
        "aria-label": `${text} replica ${number}`,
        dataset: { what },
        onclick: () => act(what),
      },
      icon(symbol),
    );
  return h(
    "tr",
    {},
    h(
      "th",
      { scope: "row" },
      h(
        "a.replica-name",
        { href: address(page, number) },
        replicaSwatch(number),
        `Replica ${number}`,
      ),
      long ? h("small.below", { dataset: { c: "device" } }) : null,
    ),
    act
      ? h(
          "td.c-act",
          {},
          button("restart", "restarting", "Restart"),
          button("stop", "stop", "Stop"),
        )
      : null,
    ...columns.map(([c, ...below]) => {
      const rest = below.map((name) => h("small.below", { dataset: { c: name } }));
      if (c === "state") {
        return h("td.c-state", { dataset: { c } }, h("span"), ...rest,
          h("span.why", { dataset: { why: "" } }), h("span.why", { dataset: { story: "" } }));
      }
      if (!below.length) return h(`td${numeric(c)}`, { dataset: { c, label: TITLE[c] } });
      return h(
        `td${numeric(c)}`,
        { dataset: { label: TITLE[c] } },
        h("span", { dataset: { c } }),
        ...rest,
      );
    }),
  );
}

function update(row, replica, run) {
  for (const cell of row.querySelectorAll("[data-c]")) {
    const c = cell.dataset.c;
    if (c === "state") {
      setState(cell.firstElementChild, replica.state);
      const why = cell.querySelector("[data-why]");
      const reason = replica.state_reason ?? "";
      setText(why, firstLine(reason));
      why.title = reason;
      why.hidden = !reason;
    } else if (c !== "beat") {
      const show = cell.classList.contains("below") ? BELOW[c] ?? SHOW[c] : SHOW[c];
      setText(cell, show(replica, run));
      if (c === "device") cell.title = replica.device;
    }
  }
  const over = RUN_ENDED.has(run.state) || run.state === "stopping";
  for (const button of row.querySelectorAll("[data-what]")) {
    const isStop = button.dataset.what === "stop";
    button.disabled =
      over || (isStop ? REPLICA_ENDED.has(replica.state) : replica.state === "done");
  }
  tick(row, replica, run);
}

function tick(row, replica, run) {
  if (!replica) return;
  const deadline = row.querySelector('[data-c="deadline"]');
  if (deadline) setText(deadline, SHOW.deadline(replica));
  const past = row.querySelector("[data-story]");
  setText(past, story(replica));
  past.hidden = !past.textContent;
  if (isStale(run) || isOld(replica.beat_at)) {
    for (const cell of row.querySelectorAll(PACE))
      setText(cell, cell.matches(".below") ? "" : format.UNKNOWN);
  }
  const cell = row.querySelector('[data-c="beat"]');
  const seconds = format.secondsSince(replica.beat_at);
  setText(
    cell,
    seconds === null ? format.UNKNOWN : seconds < 2 ? "now" : `${format.age(seconds)} ago`,
  );
  const late =
    seconds !== null &&
    !REPLICA_ENDED.has(replica.state) &&
    seconds > 3 * (replica.beat_interval_s ?? 5);
  cell.toggleAttribute("data-late", late);
  cell.title = late ? "three heartbeats missed" : "";
}
