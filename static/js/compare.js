// Curves of several runs by tokens, by time since the first step, or by money: a comparison, or the
// panels of a board. Tables and curves are fetched again when the live stream reports a change of a
// run.

import "./base.js";
import * as format from "./lib/format.js";
import { $, $$, cssColor, press, setText, url } from "./lib/dom.js";
import { getJSON, Live } from "./lib/live.js";
import { refreshed } from "./lib/part.js";
import { replicaDash, replicaHue, replicaSwatch, runNumbers } from "./lib/palette.js";
import { Chart } from "./run/chart.js";
import { line } from "./run/curves.js";

const CHOICES = { series: ["eval_loss", "loss"], x: ["tokens", "wall", "money"] };
const KEPT = ["series", "x", "table", "hide"]; // when another baseline is pinned

const EVERY_MS = 10_000;
const FAILED = "Loading the curves failed. Reload the page to try again.";

function swatches(part) {
  const places = $$("[data-swatch]", part);
  const numbers = runNumbers(new Set(places.map((place) => place.dataset.swatch)));
  for (const place of places) place.append(replicaSwatch(numbers.get(place.dataset.swatch)));
}

function comparePage() {
  swatches(document);
  const board = $("[data-board]");
  const card = $("[data-compare]");
  if (board) begin(board.dataset.board, board.dataset.stream, $$("[data-compare]").map(panel));
  else if (card) begin(card.dataset.json, card.dataset.stream, [chosenPanel(card)]);
}

/** Draw the curves of an address with all panels, again whenever a run changes. */
function begin(address, stream, panels) {
  async function load() {
    const data = await getJSON(address);
    for (const { chart, draw } of panels) {
      chart.data = data;
      draw();
    }
  }
  load().catch(() => {
    for (const { chart } of panels) chart.at.chart.dataset.empty = FAILED;
  });
  if (stream) follow(stream, load);
}

/** A chart of the comparison with the options of `chosen` (series, x, smooth, log). */
function plot(card, chosen, tables, toggleTable) {
  const view = { x: "", from: null, to: null, logy: chosen.log };
  const spec = { lines, text: format.loss, empty: "" };
  const chart = new Chart(
    { view, tables, zoom, reset: () => zoom(null, null), toggleTable },
    card,
    spec,
  );

  function lines({ runs, curves }) {
    const without = [];
    const numbers = runNumbers(runs.map((run) => run.id));
    const drawn = runs.flatMap((run, place) => {
      const number = numbers.get(run.id);
      const curve = curves.find((c) => c.run === run.id && c.series === chosen.series);
      if (!curve?.[chosen.x]) {
        without.push(`${run.name} (${curve ? "unknown price" : "no data yet"})`);
        return [];
      }
      const look = {
        points: curve.value.length < 3,
        swatch: () => replicaSwatch(number),
        color: cssColor(replicaHue(number)),
        dash: replicaDash(number),
        width: place ? 1.5 : 2.5,
      };
      const columns = { x: curve[chosen.x], y: curve.value };
      return [line(run.id, run.name, columns, { smooth: chosen.smooth ?? 0 }, look)];
    });
    const note = $("[data-note]", card);
    note.hidden = !without.length;
    setText(note, `Not shown: ${without.join(", ")}`);
    return drawn;
  }

  function draw() {
    view.x = chosen.x === "wall" ? "relative" : chosen.x;
    spec.empty = chosen.x === "money" ? "No run has a known price" : "No curves yet";
    chart.draw();
  }

  function zoom(from, to) {
    Object.assign(view, { from, to });
    draw();
  }
  return { chart, draw, zoom };
}

/** A panel of a board, whose options are stored. */
function panel(card) {
  const { series, x, smooth } = card.dataset;
  const tables = new Set();
  const chosen = { series, x, smooth: Number(smooth), log: "log" in card.dataset };
  const drawn = plot(card, chosen, tables, (id) => {
    if (!tables.delete(id)) tables.add(id);
    drawn.draw();
  });
  return drawn;
}

/** The chart of the comparison, whose options are chosen and kept in the address. */
function chosenPanel(card) {
  const chosen = {};
  for (const [name, values] of Object.entries(CHOICES)) {
    chosen[name] = values.find((value) => value === url.get(name)) ?? values[0];
  }
  const tables = new Set(url.get("table") === "1" ? [card.dataset.plot] : []);
  const showTable = () => change({}, !tables.size);
  const { chart, draw: drawChart, zoom } = plot(card, chosen, tables, showTable);

  function draw() {
    for (const group of $$("[data-choose]", card)) {
      for (const button of $$("button", group))
        press(button, button.value === chosen[group.dataset.choose]);
    }
    drawChart();
  }

  function change(values, table = tables.size > 0) {
    Object.assign(chosen, values);
    if (table) tables.add(chart.id);
    else tables.clear();
    const address = { table: table ? 1 : null };
    for (const [name, [usual]] of Object.entries(CHOICES)) {
      address[name] = chosen[name] === usual ? null : chosen[name];
    }
    url.set(address);
    if (values.x) zoom(null, null);
    draw();
  }

  for (const group of $$("[data-choose]", card)) {
    group.addEventListener("click", ({ target }) => {
      if (target.value) change({ [group.dataset.choose]: target.value });
    });
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-keep]");
    if (!link) return;
    const target = new URL(link.href);
    for (const name of KEPT) if (url.get(name)) target.searchParams.set(name, url.get(name));
    link.href = target.href;
  });
  return { chart, draw };
}

/** Tables and curves of runs that still work. */
function follow(stream, load) {
  const tables = refreshed($("[data-part]"), EVERY_MS, (content) => {
    swatches(content);
    load().catch(() => {}); // the curves shown stay; the next change loads them again
  });
  new Live({
    dot: $("[data-conn]"),
    stream,
    topic: "list",
    after: () => "",
    onDelta: tables.soon,
    poll: tables.now,
  }).start();
}

comparePage();
