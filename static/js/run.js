// The run page: one store, one connection, and the components that draw the store.

import "./base.js";
import { showSilent } from "./lib/banners.js";
import { $, $$, url } from "./lib/dom.js";
import { atMostEvery, oncePerFrame } from "./lib/frames.js";
import { getJSON, Live } from "./lib/live.js";
import { inOrder } from "./lib/requests.js";
import { RUN_ENDED } from "./lib/states.js";
import { board } from "./run/board.js";
import { checklist } from "./run/checklist.js";
import { drawer } from "./run/drawer.js";
import { eventList } from "./run/events.js";
import { failureCard } from "./run/failure.js";
import { header } from "./run/header.js";
import { heatmap } from "./run/heatmap.js";
import { poolTable } from "./run/pools.js";
import { rail } from "./run/rail.js";
import { replicaTable } from "./run/replicas.js";
import { roundDetail, roundsTable } from "./run/rounds.js";
import { tabs } from "./run/tabs.js";

const LINGER_MS = 30_000; // an ended run's last telemetry can still arrive
const STREAMED_MS = 250; // minimum interval between drawings of streamed changes
const EVERYTHING = ["run", "pools", "replicas", "rounds", "events", "points", "tab"];

/** The state of the run page. A snapshot fills it, deltas (by stream or polling) are merged in, and
 * listeners are notified of the changed parts.
 *
 * A delta can repeat known rows: rounds and replicas are identified by number, events by id. Points
 * are not stored: charts request windows of them and take newer points from `fresh`. */
class RunStore {
  run = null;
  pools = new Map();
  replicas = new Map();
  rounds = new Map();
  events = new Map();
  /** Columns of the current delta; null for a snapshot, which can change everything. */
  fresh = null;
  cursor = "";
  #listeners = [];

  /** `listener(changed: Set)` with any of run, pools, replicas, rounds, events, points. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  load(snapshot) {
    this.run = snapshot.run;
    this.cursor = snapshot.cursor;
    this.pools = new Map(snapshot.pools.map((row) => [row.id, row]));
    this.replicas = new Map(snapshot.replicas.map((row) => [row.number, row]));
    this.rounds = new Map(snapshot.rounds.map((row) => [row.number, row]));
    this.events = new Map(snapshot.events.map((row) => [row.id, row]));
    this.fresh = null;
    this.#notify(new Set(["run", "pools", "replicas", "rounds", "events", "points"]));
  }

  apply(delta, id = "") {
    if (id) this.cursor = id;
    if (!this.run) return;
    const changed = new Set();
    if (delta.run) {
      this.run = { ...this.run, ...delta.run };
      changed.add("run");
    }
    for (const [part, key] of [
      ["pools", "id"],
      ["replicas", "number"],
      ["rounds", "number"],
      ["events", "id"],
    ]) {
      for (const row of delta[part] ?? []) {
        this[part].set(row[key], row);
        changed.add(part);
      }
    }
    this.fresh = (delta.points ?? []).filter((columns) => columns.value.length);
    if (this.fresh.length) changed.add("points");
    if (changed.size) this.#notify(changed);
  }

  /** Older rounds than those of the snapshot. */
  addRounds(rows) {
    for (const row of rows) if (!this.rounds.has(row.number)) this.rounds.set(row.number, row);
    this.#notify(new Set(["rounds"]));
  }

  #notify(changed) {
    for (const listener of this.#listeners) listener(changed);
  }

  replicaRows() {
    return [...this.replicas.values()].sort((a, b) => a.number - b.number);
  }

  /** In creation order. */
  poolRows() {
    return [...this.pools.values()].sort((a, b) => a.id - b.id);
  }

  roundRows() {
    return [...this.rounds.values()].sort((a, b) => a.number - b.number);
  }

  /** Newest first. */
  eventRows() {
    return [...this.events.values()].sort((a, b) => b.id - a.id);
  }
}

/** A part of a tab, whose script is loaded when the tab is first shown. */
function inTab({ page, store }, place, load) {
  const tab = place.closest("[data-panel]").dataset.panel;
  let part = null;
  let isLoading = false;
  return (changed) => {
    if (part) return part(changed);
    if (isLoading || !store.run || page.dataset.tab !== tab) return undefined;
    isLoading = true;
    return load(place).then(
      (loaded) => {
        part = loaded;
        part(new Set(EVERYTHING));
      },
      () => (isLoading = false), // tried again with the next change
    );
  };
}

function runPage() {
  const page = $("[data-run-page]");
  const store = new RunStore();
  const context = {
    store,
    page,
    syncEvery: Number(page.dataset.syncEvery) || 1,
    /** The round in the drawer. */
    selected: Number(url.get("round")) || null,
    /** The pool whose replicas are shown, null for all. */
    pool: Number(url.get("pool")) || null,
    showPool(id) {
      context.pool = id;
      url.set({ pool: id });
      redraw(new Set(["pools", "replicas"]));
    },
    /** Open a round in the drawer. */
    select(number) {
      context.open(`round-${number}`);
    },
  };

  const parts = [
    header(context),
    rail(context),
    drawer(context),
    failureCard(context, $("[data-failure]")),
    checklist(context),
    ...$$("[data-board]").map((place) => board(context, place)),
    ...$$("[data-heatmap]").map((card) => heatmap(context, card)),
    inTab(context, $("[data-timeline]"), async (place) =>
      (await import("./run/timeline.js")).timeline(context, place),
    ),
    poolTable(context),
    ...$$("[data-replicas]").map((place) => replicaTable(context, place)),
    roundDetail(context, $("[data-round-detail]")),
    roundsTable(context, $("[data-rounds-table]")),
    ...$$("[data-events]").map((place) => eventList(context, place)),
    inTab(context, $("[data-logs-card]"), async (place) =>
      (await import("./run/logs.js")).logLines(context, place),
    ),
    inTab(context, $("[data-activity]"), async (place) =>
      (await import("./run/activity.js")).activityList(context, place),
    ),
    inTab(context, $("[data-refresh]"), async (place) =>
      (await import("./run/checkpoints.js")).checkpointList(context, place),
    ),
    inTab(context, $("[data-evaluations]"), async (place) =>
      (await import("./run/checkpoints.js")).evaluationList(context, place),
    ),
  ];

  let pending = new Set();
  function draw() {
    const changed = pending;
    pending = new Set();
    if (changed.size) for (const part of parts) part(changed);
  }
  const flush = oncePerFrame(draw);
  const streamed = atMostEvery(STREAMED_MS, draw);
  /** Draw what depends on `changed` in the next frame. */
  function redraw(changed) {
    for (const one of changed) pending.add(one);
    flush();
  }
  context.redraw = redraw;

  const tab = tabs(context, () => redraw(new Set(["tab"])));
  addEventListener("popstate", () => {
    context.pool = Number(url.get("pool")) || null;
    if (store.run) redraw(new Set(["pools", "replicas"])); // the first snapshot draws all
  });

  const newest = inOrder(() => getJSON(page.dataset.snapshot));
  async function refresh() {
    const snapshot = await newest();
    if (!snapshot) return;
    showSilent(snapshot.silent_since);
    store.load(snapshot);
  }
  const live = new Live({
    dot: $("[data-conn]"),
    stream: page.dataset.stream,
    topic: page.dataset.run,
    after: () => store.cursor,
    onDelta: (delta, id) => store.apply(delta, id),
    poll: refresh,
    run: () => store.run,
  });

  let ending = 0;
  store.listen((changed) => {
    for (const one of changed) pending.add(one);
    streamed();
    if (!changed.has("run") || ending || !RUN_ENDED.has(store.run.state)) return;
    const since = store.run.ended_at ? Date.now() - Date.parse(store.run.ended_at) : 0;
    if (since > LINGER_MS) live.end();
    else
      ending = setTimeout(() => live.load().then(() => live.end()), LINGER_MS - since);
  });

  async function begin() {
    // Without a first snapshot there is nothing to merge into.
    if (!(await live.load())) {
      if (!live.over) setTimeout(begin, 3000);
      return;
    }
    redraw(new Set(["tab"])); // parts that wait until their tab is shown
    if (!live.over) live.start();
  }
  begin();
}

runPage();
