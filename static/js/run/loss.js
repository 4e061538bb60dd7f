// The loss chart: one thin line per replica, and the evaluation of the global weights on top.

import uPlot from "../../vendor/uplot-1.6.32/uPlot.esm.js";
import * as format from "../lib/format.js";
import { $, $$, cssColor, darkScheme, h, setText, url } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";
import { evalSwatch, replicaDash, replicaHue, replicaSwatch } from "../lib/palette.js";
import { seriesKey } from "../lib/store.js";
import { lastKnown, rising, smoothed, xValues } from "./curves.js";

const AXES = { step: "inner step", round: "round", tokens: "tokens of all replicas", wall: "time since the first step" };
const DEFAULT_SMOOTH = 0.8;
const TABLE_ROWS = 200;
const DENSE = 60; // evaluations
const SERIES = ["loss", "eval_loss"];
const FULL_FOR = 16; // replicas; with more, what the snapshot has is enough for a screen
const FULL_POINTS = 4000;
const THIN_POINTS = 2000;
const RESAMPLE_ABOVE = 6000; // points of one series

export function lossChart(context, card) {
  const { store, page } = context;
  const at = {
    chart: $("[data-chart]", card), legend: $("[data-legend]", card), say: $("[data-say]", card),
    table: $("[data-chart-table]", card), tableButton: $("[data-table]", card),
    smooth: $("[data-smooth]", card), smoothOut: $("[data-smooth-out]", card), x: $("[data-x]", card),
  };
  const view = {
    axis: Object.hasOwn(AXES, url.get("x") ?? "") ? url.get("x") : "step",
    smooth: clamp(Number(url.get("smooth") ?? DEFAULT_SMOOTH), 0, 0.98),
    hidden: new Set((url.get("hide") ?? "").split(",").filter(Boolean)),
    table: url.get("table") === "loss",
  };
  let plot = null;
  let shape = ""; // what the plot was built for; data alone does not rebuild it
  let curves = [];

  function collect() {
    const begun = Math.min(...[...store.series.values()].filter((c) => c.wall_s.length && c.series === "loss").map((c) => c.wall_s[0]));
    const facts = { syncEvery: context.syncEvery, replicas: store.run.target, begun };
    const found = store.replicaRows().map((replica) => ({ id: `r${replica.number}`, name: `Replica ${replica.number}`, number: replica.number, columns: store.series.get(seriesKey("loss", replica.number)) }));
    found.push({ id: "eval", name: "Evaluation", number: null, columns: store.series.get(seriesKey("eval_loss", null)) });
    return found.filter((curve) => curve.columns?.value.length).map((curve) => {
      const [x, y] = rising(xValues(curve.columns, view.axis, facts), curve.columns.value);
      return { ...curve, x, raw: y, y: curve.number === null ? y : smoothed(y, view.smooth) };
    });
  }

  function draw() {
    if (!store.run || !card.offsetParent) return; // not on a tab that is shown
    curves = collect();
    at.chart.toggleAttribute("data-empty", !curves.length);
    if (!curves.length) {
      at.chart.dataset.empty = "The curve begins with the first step";
      plot?.destroy();
      plot = null;
      shape = "";
      return;
    }
    const tables = curves.map((c) => (c.number === null ? [c.x, c.y] : [c.x, c.raw, c.y]));
    const data = uPlot.join(tables);
    const wanted = JSON.stringify([curves.map((c) => c.id), view.axis, view.smooth > 0, darkScheme.matches, curves.at(-1).x.length > DENSE]);
    if (plot && wanted === shape) {
      const zoomed = plot.zoomed;
      plot.setData(data, !zoomed);
      if (zoomed) plot.redraw();
    } else {
      plot?.destroy();
      plot = new uPlot(options(curves, at.chart, view, read), data, at.chart);
      shape = wanted;
      legend();
    }
    showHidden();
    readLegend(plot.cursor.idx);
    if (view.table) fillTable();
  }

  function showHidden() {
    let place = 1;
    for (const curve of curves) {
      const shown = !view.hidden.has(curve.id);
      const width = curve.number === null ? 1 : 2;
      for (let i = 0; i < width; i++) if (plot.series[place + i].show !== shown) plot.setSeries(place + i, { show: shown });
      place += width;
    }
  }

  function legend() {
    at.legend.replaceChildren(...[...curves].reverse().sort((a, b) => (a.number ?? -1) - (b.number ?? -1)).map((curve) =>
      h("button", { type: "button", "aria-pressed": String(!view.hidden.has(curve.id)), dataset: { id: curve.id }, onclick: (event) => toggle(curve.id, event.currentTarget) },
        curve.number === null ? evalSwatch() : replicaSwatch(curve.number), h("span", {}, curve.name), h("output"))));
  }

  function toggle(id, button) {
    if (!view.hidden.delete(id)) view.hidden.add(id);
    button.setAttribute("aria-pressed", String(!view.hidden.has(id)));
    url.set({ hide: [...view.hidden].join(",") });
    showHidden();
  }

  function readLegend(index) {
    let place = 1;
    for (const curve of curves) {
      const column = plot.data[curve.number === null ? place : place + 1];
      place += curve.number === null ? 1 : 2;
      const value = lastKnown(column, index ?? column.length - 1);
      setText($(`[data-id="${curve.id}"] output`, at.legend), format.loss(value));
    }
  }

  /** The cursor has moved: by pointer or by key. */
  function read(u, spoken = false) {
    readLegend(u.cursor.idx);
    if (!spoken || u.cursor.idx === null) return;
    const x = u.data[0][u.cursor.idx];
    const values = $$("button[aria-pressed=true]", at.legend).map((b) => `${b.children[1].textContent} ${b.lastElementChild.textContent}`);
    setText(at.say, `${axisWord(view.axis, x)}: ${values.join(", ")}`);
  }

  function step(by) {
    if (!plot) return;
    const last = plot.data[0].length - 1;
    const jump = Math.max(1, Math.round(last / 100)) * by;
    const index = clamp((plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + jump, 0, last);
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
    read(plot, true);
  }

  function fillTable() {
    const x = plot.data[0];
    const every = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
    const picked = x.map((_, i) => i).filter((i) => i % every === 0 || i === x.length - 1);
    const columns = [];
    let place = 1;
    for (const curve of curves) {
      columns.push(plot.data[curve.number === null ? place : place + 1]);
      place += curve.number === null ? 1 : 2;
    }
    at.table.replaceChildren(
      h("table", {},
        h("caption.visually-hidden", {}, `Loss by ${AXES[view.axis]}`),
        h("thead", {}, h("tr", {}, h("th.num", { scope: "col" }, AXES[view.axis]), ...curves.map((c) => h("th.num", { scope: "col" }, c.name)))),
        h("tbody", {}, ...picked.map((i) => h("tr", {}, h("th.num", { scope: "row" }, axisValue(view.axis, x[i])), ...columns.map((c) => h("td.num", {}, format.loss(lastKnown(c, i)))))))));
  }

  function controls() {
    for (const button of $$("button", at.x)) button.setAttribute("aria-pressed", String(button.value === view.axis));
    at.smooth.value = view.smooth;
    setText(at.smoothOut, view.smooth ? view.smooth.toFixed(2) : "off");
    at.table.hidden = !view.table;
    at.chart.hidden = view.table;
    at.tableButton.setAttribute("aria-pressed", String(view.table));
  }

  function change(values) {
    Object.assign(view, values);
    url.set({
      x: view.axis === "step" ? null : view.axis,
      smooth: view.smooth === DEFAULT_SMOOTH ? null : view.smooth,
      table: view.table ? "loss" : null,
    });
    controls();
    if (view.table && plot) fillTable();
    draw();
  }

  at.x.addEventListener("click", (event) => event.target.value && change({ axis: event.target.value }));
  at.smooth.addEventListener("input", () => change({ smooth: Number(at.smooth.value) }));
  at.tableButton.addEventListener("click", () => change({ table: !view.table }));
  at.chart.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    step(event.shiftKey ? by * 5 : by);
  });
  darkScheme.addEventListener("change", draw);
  new ResizeObserver(() => plot && at.chart.clientWidth && plot.setSize({ width: at.chart.clientWidth, height: at.chart.clientHeight })).observe(at.chart);
  controls();

  return (changed) => {
    if (changed.has("points")) refine(store, page);
    if (changed.has("points") || changed.has("run") || changed.has("tab")) draw();
  };
}

/** A snapshot carries few points of each series: ask for more of them, once. And when a series has
 * grown too long to draw at every update, let the server thin it. */
async function refine(store, page) {
  for (const columns of [...store.series.values()]) {
    const { series, replica, value, total, full, asked } = columns;
    const few = !full && total > value.length && store.replicas.size <= FULL_FOR;
    const many = value.length > RESAMPLE_ABOVE;
    if (asked || !(few || many) || !SERIES.includes(series)) continue;
    columns.asked = true;
    const points = few ? FULL_POINTS : THIN_POINTS;
    try {
      store.replace(await getJSON(`${page.dataset.points}?series=${series}&replica=${replica ?? ""}&max_points=${points}`));
    } catch {
      columns.asked = false; // the connection's dot says how it is; the next update tries again
      return;
    }
  }
}

const clamp = (value, low, high) => Math.min(Math.max(Number.isFinite(value) ? value : low, low), high);

function axisValue(axis, x) {
  if (axis === "wall") return format.duration(x);
  if (axis === "round") return String(Math.round(x * 100) / 100);
  return format.count(x);
}

const axisWord = (axis, x) => (axis === "wall" ? `after ${axisValue(axis, x)}` : `${axis} ${axisValue(axis, x)}`);

function options(curves, place, view, read) {
  const ink = cssColor("--text");
  const dim = cssColor("--text-3");
  const grid = { stroke: cssColor("--grid"), width: 1 };
  const font = `11px ${cssColor("--font")}`;
  const series = [{}];
  for (const curve of curves) {
    if (curve.number === null) {
      // Points while they can be told apart; then the line alone.
      const few = curve.x.length <= DENSE;
      series.push({ stroke: ink, width: 2, spanGaps: true, points: { show: few, size: 7, fill: ink, stroke: cssColor("--surface"), width: 1.5 } });
      continue;
    }
    const color = cssColor(replicaHue(curve.number));
    const dash = replicaDash(curve.number);
    // The raw values are a ghost behind the smoothed line; without smoothing they are the same.
    series.push({ stroke: view.smooth > 0 ? `${color}38` : "transparent", width: 1, spanGaps: true, points: { show: false } });
    series.push({ stroke: color, width: 1.5, dash, spanGaps: true, points: { show: false } });
  }
  let zoomed = false;
  return {
    // Behind the table the frame has no size; it is resized when it is shown.
    width: place.clientWidth || 600,
    height: place.clientHeight || 300,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    focus: { alpha: 1 },
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false, dist: 6 } },
    scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) } },
    axes: [
      { stroke: dim, font, grid, ticks: { ...grid, size: 4 }, size: 28, gap: 4, labelFont: font, labelSize: 18, labelGap: 0, label: AXES[view.axis], space: 64, values: (u, ticks) => ticks.map((t) => (view.axis === "wall" ? format.duration(t) : format.count(t))) },
      { stroke: dim, font, grid, ticks: { show: false }, size: 46, gap: 6, values: (u, ticks) => ticks.map((t) => String(Number(t.toFixed(3)))) },
    ],
    series,
    hooks: {
      setCursor: [(u) => u.data && read(u)],
      setSelect: [(u) => { zoomed = u.select.width > 0 || zoomed; u.zoomed = zoomed; }],
      ready: [(u) => u.over.addEventListener("dblclick", () => { zoomed = false; u.zoomed = false; })],
    },
  };
}
