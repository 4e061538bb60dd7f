// The run page: one store, one connection, and the parts that draw what the store holds.

import { isStale, showSilent, showStale } from "./lib/banners.js";
import { $, $$, oncePerFrame, url } from "./lib/dom.js";
import { getJSON, Live } from "./lib/live.js";
import { RUN_ENDED } from "./lib/states.js";
import { RunStore } from "./lib/store.js";
import { alertList, checkpointList } from "./run/alerts.js";
import { board } from "./run/board.js";
import { checklist } from "./run/checklist.js";
import { eventList } from "./run/events.js";
import { header } from "./run/header.js";
import { heatmap } from "./run/heatmap.js";
import { logLines } from "./run/logs.js";
import { poolTable } from "./run/pools.js";
import { replicaTable } from "./run/replicas.js";
import { roundDetail, roundsTable } from "./run/rounds.js";
import { tabs } from "./run/tabs.js";
import { timeline } from "./run/timeline.js";

const LINGER_MS = 30_000; // an ended run's last telemetry may still come in

export function runPage() {
  const page = $("[data-run-page]");
  const store = new RunStore();
  const context = {
    store,
    page,
    syncEvery: Number(page.dataset.syncEvery) || 1,
    /** The chosen round is part of the address. */
    selected: Number(url.get("round")) || null,
    /** The pool whose replicas are shown, null for all. */
    pool: Number(url.get("pool")) || null,
    showPool(id) {
      context.pool = id;
      url.set({ pool: id });
      redraw(new Set(["pools", "replicas"]));
    },
    select(number) {
      context.selected = number;
      url.set({ round: number });
      tab.show("rounds", { push: true });
      redraw(new Set(["rounds"]));
      $("[data-round-detail]").scrollIntoView({ block: "nearest" });
    },
  };

  const parts = [
    header(context),
    checklist(context),
    ...$$("[data-board]").map((place) => board(context, place)),
    ...$$("[data-heatmap]").map((card) => heatmap(context, card)),
    timeline(context, $("[data-timeline]")),
    poolTable(context),
    ...$$("[data-replicas]").map((place) => replicaTable(context, place)),
    roundDetail(context, $("[data-round-detail]")),
    roundsTable(context, $("[data-rounds-table]")),
    ...$$("[data-events]").map((place) => eventList(context, place)),
    logLines(context, $("[data-logs-card]")),
    alertList(context, $("[data-alerts]")),
    checkpointList(context, $("[data-refresh]")),
  ];

  let pending = new Set();
  const flush = oncePerFrame(() => {
    const changed = pending;
    pending = new Set();
    for (const part of parts) part(changed);
  });
  function redraw(changed) {
    for (const one of changed) pending.add(one);
    flush();
  }

  const tab = tabs(context, () => redraw(new Set(["tab"])));
  addEventListener("popstate", () => {
    context.selected = Number(url.get("round")) || null;
    context.pool = Number(url.get("pool")) || null;
    redraw(new Set(["rounds", "pools", "replicas"]));
  });

  async function refresh() {
    const snapshot = await getJSON(page.dataset.snapshot);
    showSilent(snapshot.silent_since);
    store.load(snapshot);
  }
  setInterval(() => store.run && showStale(Number(isStale(store.run))), 1000);

  const live = new Live({
    dot: $("[data-conn]"),
    stream: () => `${page.dataset.stream}?after=${encodeURIComponent(store.cursor)}`,
    onDelta: (delta, id) => store.apply(delta, id),
    poll: refresh,
  });

  let ending = 0;
  store.listen((changed) => {
    redraw(changed);
    if (!changed.has("run") || ending || !RUN_ENDED.has(store.run.state)) return;
    const since = store.run.ended_at ? Date.now() - Date.parse(store.run.ended_at) : 0;
    if (since > LINGER_MS) live.end();
    else ending = setTimeout(() => refresh().catch(() => {}).finally(() => live.end()), LINGER_MS - since);
  });

  async function begin() {
    try {
      await refresh();
    } catch {
      // Without a first snapshot there is nothing to merge into: say so and try again.
      $("[data-conn]").dataset.state = "reconnecting";
      $("[data-conn]").textContent = "The server does not answer; trying again";
      setTimeout(begin, 3000);
      return;
    }
    redraw(new Set(["tab"])); // parts that wait until their tab is shown
    if (!live.over) live.start();
  }
  for (const time of $$("time[data-when]")) time.textContent = new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
  begin();
}
