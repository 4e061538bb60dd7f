// Loss of several runs over what it took: tokens of all replicas, time since the first step, money.

import uPlot from "./lib/uplot.js";
import * as format from "./lib/format.js";
import { $, $$, cssColor, darkScheme, h, setText, url } from "./lib/dom.js";
import { replicaDash, replicaHue, replicaSwatch } from "./lib/palette.js";
import { lastKnown, rising } from "./lib/series.js";

const X = { tokens: "tokens of all replicas", wall: "time since the first step", money: "US dollars" };
const SHOW_X = { tokens: format.count, wall: format.duration, money: format.money };
const SERIES = { eval_loss: "Evaluation loss", loss: "Training loss, mean of a round" };
const TABLE_ROWS = 100;

for (const place of $$("[data-swatch]")) place.append(replicaSwatch(Number(place.dataset.swatch)));

const card = $("[data-compare]");
if (card) begin();

function begin() {
  const at = { chart: $("[data-chart]", card), legend: $("[data-legend]", card), note: $("[data-note]", card), table: $("[data-chart-table]", card), say: $("[data-say]", card), tableButton: $("[data-table]", card) };
  const one = (name, among, other) => (Object.hasOwn(among, url.get(name) ?? "") ? url.get(name) : other);
  const view = { series: one("series", SERIES, "eval_loss"), x: one("x", X, "tokens"), table: url.get("table") === "1", hidden: new Set((url.get("hide") ?? "").split(",").filter(Boolean)) };
  let known = null;
  let plot = null;
  let shown = [];

  function pick() {
    const without = [];
    shown = [];
    known.runs.forEach((run, number) => {
      const curve = known.curves.find((c) => c.run === run.id && c.series === view.series);
      const column = curve?.[view.x];
      if (curve && column) {
        const [x, y] = rising(column, curve.value);
        shown.push({ ...run, number, x, y });
      } else without.push(`${run.name} (${curve ? "a price is not known" : "no such curve yet"})`);
    });
    at.note.hidden = !without.length;
    setText(at.note, without.length ? `Not shown: ${without.join(", ")}` : "");
  }

  function draw() {
    pick();
    plot?.destroy();
    plot = null;
    at.chart.toggleAttribute("data-empty", !shown.length);
    if (!shown.length) at.chart.dataset.empty = view.x === "money" ? "No run here has a known price" : "No curves yet";
    else plot = new uPlot(options(), uPlot.join(shown.map((run) => [run.x, run.y])), at.chart);
    at.legend.replaceChildren(...shown.map((run) =>
      h("button", { type: "button", "aria-pressed": String(!view.hidden.has(run.id)), title: run.name, onclick: () => toggle(run.id) },
        replicaSwatch(run.number), h("span.cut", {}, run.name), h("output"))));
    shown.forEach((run, i) => plot.setSeries(i + 1, { show: !view.hidden.has(run.id) }));
    read();
    for (const group of $$("[data-choose]", card)) {
      for (const button of $$("button", group)) button.setAttribute("aria-pressed", String(button.value === view[group.dataset.choose]));
    }
    at.chart.hidden = view.table;
    at.table.hidden = !view.table;
    at.tableButton.setAttribute("aria-pressed", String(view.table));
    if (view.table && plot) fillTable();
  }

  function toggle(id) {
    if (!view.hidden.delete(id)) view.hidden.add(id);
    url.set({ hide: [...view.hidden].join(",") });
    draw();
  }

  function read() {
    if (!plot) return;
    shown.forEach((run, i) => {
      const column = plot.data[i + 1];
      setText($("output", at.legend.children[i]), format.loss(lastKnown(column, plot.cursor.idx ?? column.length - 1)));
    });
  }

  function fillTable() {
    const x = plot.data[0];
    const every = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
    const picked = x.map((_, i) => i).filter((i) => i % every === 0 || i === x.length - 1);
    at.table.replaceChildren(h("table", {},
      h("caption.visually-hidden", {}, `${SERIES[view.series]} by ${X[view.x]}`),
      h("thead", {}, h("tr", {}, h("th.num", { scope: "col" }, X[view.x]), ...shown.map((run) => h("th.num", { scope: "col" }, run.name)))),
      h("tbody", {}, ...picked.map((i) => h("tr", {}, h("th.num", { scope: "row" }, SHOW_X[view.x](x[i])),
        ...shown.map((_, k) => h("td.num", {}, format.loss(lastKnown(plot.data[k + 1], i)))))))));
  }

  function options() {
    const dim = cssColor("--text-3");
    const grid = { stroke: cssColor("--grid"), width: 1 };
    const font = `11px ${cssColor("--font")}`;
    const axis = { stroke: dim, font, grid };
    return {
      width: at.chart.clientWidth || 600,
      height: at.chart.clientHeight || 300,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false, dist: 6 } },
      scales: { x: { time: false, range: (u, low, high) => (low === high ? [low, low + 1] : [low, high]) } },
      axes: [
        { ...axis, ticks: { ...grid, size: 4 }, size: 28, gap: 4, label: X[view.x], labelFont: font, labelSize: 18, labelGap: 0, space: 72, values: (u, ticks) => ticks.map(SHOW_X[view.x]) },
        { ...axis, ticks: { show: false }, size: 46, gap: 6, values: (u, ticks) => ticks.map((t) => String(Number(t.toFixed(3)))) },
      ],
      series: [{}, ...shown.map((run) => ({
        stroke: cssColor(replicaHue(run.number)), dash: replicaDash(run.number), width: run.number === 0 ? 2.5 : 1.5, spanGaps: true,
        points: { show: run.x.length < 3, size: 6 },
      }))],
      hooks: { setCursor: [(u) => u === plot && read()] },
    };
  }

  function change(values) {
    Object.assign(view, values);
    url.set({ series: view.series === "eval_loss" ? null : view.series, x: view.x === "tokens" ? null : view.x, table: view.table ? "1" : null });
    draw();
  }

  for (const group of $$("[data-choose]", card)) {
    group.addEventListener("click", (event) => event.target.value && change({ [group.dataset.choose]: event.target.value }));
  }
  at.tableButton.addEventListener("click", () => change({ table: !view.table }));
  at.chart.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !plot) return;
    event.preventDefault();
    const last = plot.data[0].length - 1;
    const jump = Math.max(1, Math.round(last / 100)) * by * (event.shiftKey ? 5 : 1);
    const index = Math.min(Math.max((plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + jump, 0), last);
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
    read();
    setText(at.say, `${SHOW_X[view.x](plot.data[0][index])}: ${shown.map((run, i) => `${run.name} ${$("output", at.legend.children[i]).textContent}`).join(", ")}`);
  });
  darkScheme.addEventListener("change", () => known && draw());
  new ResizeObserver(() => plot && at.chart.clientWidth && plot.setSize({ width: at.chart.clientWidth, height: at.chart.clientHeight })).observe(at.chart);

  // What was chosen of the chart stays when another baseline is pinned.
  card.ownerDocument.addEventListener("click", (event) => {
    const link = event.target.closest("[data-keep]");
    if (!link) return;
    const target = new URL(link.href);
    for (const name of ["series", "x", "table", "hide"]) if (url.get(name)) target.searchParams.set(name, url.get(name));
    link.href = target.href;
  });

  (async () => {
    try {
      const response = await fetch(card.dataset.json, { headers: { Accept: "application/json" } });
      if (response.redirected || !(response.ok || response.status === 422)) throw new Error(String(response.status));
      known = await response.json();
    } catch {
      at.chart.dataset.empty = "The curves could not be read. Reload the page to try again.";
      return;
    }
    draw();
  })();
}
