// Curves of several runs by tokens, by time since the first step, or by money: a comparison, or the
// panels of a board. Tables and curves are fetched again when the live stream reports a change of a
// run.

import "./base.js";
import * as format from "./lib/format.js";
import { $, $$, clamp, cssColor, marked, press, setText, url } from "./lib/dom.js";
import { getJSON, Live } from "./lib/live.js";
import { refreshed } from "./lib/part.js";
import { inOrder } from "./lib/requests.js";
import { replicaDash, replicaHue, replicaSwatch, runNumbers } from "./lib/palette.js";
import { Chart } from "./run/chart.js";
import { line } from "./run/curves.js";

const KEPT = ["series", "x", "smooth", "log", "table", "hide"]; // when another baseline is pinned
/** Formats of metrics; the others are losses. */
const TEXT = {
  norm: format.short,
  update_norm: format.short,
  tokens_per_s: format.count,
  goodput: format.percent,
  contributors: format.count,
};

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
  if (board) boardPage(board);
  else if (card) begin(chosenPanel(card), card.dataset.stream);
}

function boardPage(board) {
  const panels = $$("[data-compare]").map(panel);
  const newest = inOrder(() => getJSON(board.dataset.board));
  async function load() {
    const data = await newest();
    if (!data) return;
    for (const { chart, draw } of panels) {
      chart.data = data;
      draw();
    }
  }
  begin({ load, charts: panels.map(({ chart }) => chart) }, board.dataset.stream);
}

/** Draw the curves, again whenever a run changes. */
function begin({ load, charts }, stream) {
  load().catch(() => {
    for (const { at, data } of charts) if (!data) at.chart.dataset.empty = FAILED;
  });
  if (stream) follow(stream, load);
}

/** A chart of the comparison with the options of `chosen` (series, x, smooth, log). */
function plot(card, chosen, tables, toggleTable) {
  const view = { x: "", from: null, to: null, logy: false };
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
    view.logy = chosen.log;
    spec.text = TEXT[chosen.series] ?? format.loss;
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
  const at = marked(card, "metric", "x", "smooth", "smooth-out", "logy");
  const offered = (values, name) => values.find((value) => value === url.get(name)) ?? values[0];
  const metrics = [...at.metric.options].map((option) => option.value);
  const axes = $$("button", at.x).map((button) => button.value);
  const chosen = {
    series: offered(metrics, "series"),
    x: offered(axes, "x"),
    smooth: clamp(Number(url.get("smooth")) || 0, 0, Number(at.smooth.max)),
    log: url.get("log") === "y",
  };
  const tables = new Set(url.get("table") === "1" ? [card.dataset.plot] : []);
  const showTable = () => change({}, !tables.size);
  const { chart, draw: drawChart, zoom } = plot(card, chosen, tables, showTable);

  const newest = inOrder(() =>
    getJSON(`${card.dataset.json}&${new URLSearchParams({ series: chosen.series })}`),
  );
  async function load() {
    const { series } = chosen;
    const data = await newest();
    if (!data || series !== chosen.series) return; // another one was chosen meanwhile
    chart.data = data;
    drawChart();
  }

  function draw() {
    at.metric.value = chosen.series;
    for (const button of $$("button", at.x)) press(button, button.value === chosen.x);
    at.smooth.value = chosen.smooth;
    setText(at["smooth-out"], String(chosen.smooth));
    press(at.logy, chosen.log);
    drawChart();
  }

  function change(values, table = tables.size > 0) {
    Object.assign(chosen, values);
    if (table) tables.add(chart.id);
    else tables.clear();
    url.set({
      series: chosen.series === metrics[0] ? null : chosen.series,
      x: chosen.x === axes[0] ? null : chosen.x,
      smooth: chosen.smooth || null,
      log: chosen.log ? "y" : null,
      table: table ? 1 : null,
    });
    if (values.x) zoom(null, null);
    draw();
  }

  at.metric.addEventListener("change", () => {
    chart.data = null; // the curve that is shown stays until the other one arrives
    change({ series: at.metric.value });
    const { series } = chosen;
    load().catch(() => {
      if (series !== chosen.series || chart.data) return;
      chart.data = { runs: [], curves: [] };
      drawChart();
      chart.at.chart.dataset.empty = FAILED;
    });
  });
  at.x.addEventListener("click", ({ target }) => target.value && change({ x: target.value }));
  at.smooth.addEventListener("input", () => change({ smooth: Number(at.smooth.value) }));
  at.logy.addEventListener("click", () => change({ log: !chosen.log }));

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-keep]");
    if (!link) return;
    const target = new URL(link.href);
    for (const name of KEPT) if (url.get(name)) target.searchParams.set(name, url.get(name));
    link.href = target.href;
  });
  draw();
  return { load, charts: [chart] };
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
    onDelta: tables.soon,
    poll: tables.now,
  }).start();
}

comparePage();
