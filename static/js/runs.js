// The runs list: rows are rendered by the server and kept up to date cell by cell. A run that is
// not on the page becomes a pill; no row moves by itself.

import * as format from "./lib/format.js";
import { $, $$, setFraction, setState, setText } from "./lib/dom.js";
import { getJSON, Live } from "./lib/live.js";
import { look, RUN_ENDED } from "./lib/states.js";

const list = $("[data-runs]");
const pill = $("[data-new]");
const rows = new Map($$("[data-run]").map((row) => [row.dataset.run, row]));
const fresh = new Set();

function show(run) {
  const row = rows.get(run.id);
  if (!row) {
    announce(run);
    return;
  }
  const cell = (name) => $(`[data-f="${name}"]`, row);
  const ended = RUN_ENDED.has(run.state);
  setState(cell("state"), run.state);
  setText(cell("replicas"), `${run.live}/${run.target}`);
  setText(cell("rounds"), `${run.committed_rounds}/${run.total_rounds}`);
  setFraction(cell("bar"), run.committed_rounds / run.total_rounds, look(run.state).tone);
  setText(cell("eval_loss"), format.loss(run.eval_loss));
  setText(cell("train_loss"), format.loss(run.train_loss));
  setText(cell("tokens"), format.count(run.tokens));
  setText(cell("tokens_per_s"), ended ? format.UNKNOWN : format.count(run.tokens_per_s));
  if (run.started_at && !$("time", cell("started"))) {
    const time = document.createElement("time");
    time.dateTime = run.started_at;
    time.dataset.age = "";
    time.textContent = format.age(format.secondsSince(run.started_at));
    cell("started").replaceChildren(time);
  }
  Object.assign(cell("ran").dataset, { from: run.started_at ?? "", to: run.ended_at ?? "" });
}

function announce(run) {
  // Only what was submitted after the newest row we show can be new here.
  if (list.dataset.firstPage !== "1") return;
  fresh.add(run.id);
  pill.hidden = false;
  setText($("span", pill), `${fresh.size} new`);
}

function tick() {
  for (const cell of $$('[data-f="ran"]')) {
    const { from, to } = cell.dataset;
    const end = to ? Date.parse(to) : Date.now();
    setText(cell, from ? format.elapsed((end - Date.parse(from)) / 1000) : format.UNKNOWN);
  }
}

for (const [, row] of rows) {
  const bar = $('[data-f="bar"]', row);
  bar.dataset.tone = $("[data-tone]", row).dataset.tone;
}
tick();
setInterval(tick, 1000);
pill?.addEventListener("click", () => location.assign(location.pathname));

if (list) {
  new Live({
    dot: $("[data-conn]"),
    stream: () => list.dataset.stream,
    onDelta: (delta) => delta.run && show(delta.run),
    poll: async () => {
      const { runs } = await getJSON(list.dataset.poll + location.search);
      runs.forEach(show);
    },
  }).start();
} else $("[data-conn]").hidden = true;
