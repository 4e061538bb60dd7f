// A chart of lines: uPlot inside a card, its legend, its table, what keys and pointer read.

import uPlot from "../lib/uplot.js";
import * as format from "../lib/format.js";
import { $, clamp, cssColor, darkScheme, h, marked, press, setText, table, url } from "../lib/dom.js";
import { lastKnown, search, usual } from "./curves.js";

export const AXES = { step: "inner step", round: "round", tokens: "tokens of all replicas", wall: "time", relative: "time since the first step", money: "US dollars" };
const TABLE_ROWS = 200;
const ODD = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** What every plot has: the size of its frame, the page's colours; `x` and `y` are of its two axes. */
export function look(place, x, y, more) {
  const font = `11px ${cssColor("--font")}`;
  const grid = { stroke: cssColor("--grid"), width: 1 };
  const axis = { stroke: cssColor("--text-3"), font, grid, ticks: { show: false }, gap: 6 };
  return {
    // Behind a table the frame has no size; it is resized when it is shown.
    width: place.clientWidth || 600,
    height: place.clientHeight || 200,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    axes: [{ ...axis, size: 28, gap: 4, labelFont: font, labelSize: 18, labelGap: 0, ...x }, ...[y].flat().map((one) => ({ ...axis, size: 50, ...one }))],
    ...more,
  };
}

/** The plot that `plot()` gives follows its frame. */
export const follow = (place, plot) => new ResizeObserver(() => place.clientWidth && plot()?.setSize({ width: place.clientWidth, height: place.clientHeight })).observe(place);

/** `card` draws what `spec` makes of `data` under `board.view`. */
export class Chart {
  constructor(board, card, spec) {
    Object.assign(this, { board, card, spec, id: card.dataset.plot, data: null, lines: [], plot: null, shape: "" });
    this.at = marked(card, "chart", "legend", "say", "chart-table", "table", "badge", "csv", "png");
    this.hidden = new Set((url.get("hide") ?? "").split(",").filter((name) => name.startsWith(`${this.id}.`)).map((name) => name.slice(this.id.length + 1)));
    this.at.table.addEventListener("click", () => board.toggleTable(this.id));
    this.at.csv?.addEventListener("click", () => this.#save(`${this.id}.csv`, new Blob([this.#csv()], { type: "text/csv" })));
    this.at.png?.addEventListener("click", () => this.plot?.ctx.canvas.toBlob((blob) => this.#save(`${this.id}.png`, blob)));
    this.at.chart.addEventListener("keydown", (event) => this.#press(event));
    follow(this.at.chart, () => this.plot);
    darkScheme.addEventListener("change", () => this.draw());
  }

  draw() {
    const { board, at } = this;
    if (!this.data || !this.card.offsetParent) return;
    this.lines = this.spec.lines(this.data, board.view).filter((one) => one.band || one.x.length);
    const listed = board.tables.has(this.id);
    at["chart-table"].hidden = !listed;
    at.chart.hidden = listed;
    press(at.table, listed);
    this.#badge();
    at.chart.toggleAttribute("data-empty", !this.lines.length);
    if (!this.lines.length) {
      at.chart.dataset.empty = this.spec.empty;
      at.legend.replaceChildren();
      this.plot?.destroy();
      this.plot = null;
      return;
    }
    const log = this.#log();
    const positive = (column, on) => (on ? column.map((v) => (v > 0 ? v : null)) : column);
    const tables = this.lines.flatMap((one) => (one.band ?? [[one.x, one.y], ...(one.ghost ? [[one.x, one.ghost]] : [])]).map(([x, y]) => [x, positive(y, log.y)]));
    const data = uPlot.join(log.x ? tables.map(([x, y]) => cut(x, y)) : tables);
    const columns = this.lines.filter((one) => !one.band).flatMap((one) => (this.hidden.has(one.id) ? [] : [one.ghost ?? one.y]));
    this.usual = board.view.clip && !this.spec.plain ? usual(columns) : null;
    const wanted = JSON.stringify([this.lines.map((one) => [one.id, Boolean(one.ghost), one.points]), board.view.x, log, darkScheme.matches]);
    if (this.plot && wanted === this.shape) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.plot = new uPlot(this.#options(log), data, at.chart);
      this.shape = wanted;
      this.#legend();
    }
    this.#show();
    this.read();
    if (listed) this.#fill();
  }

  clipped() {
    return this.usual?.clipped ?? 0;
  }

  #log() {
    return { y: this.board.view.logy && !this.spec.plain, x: this.board.view.logx && !["wall", "relative"].includes(this.board.view.x) };
  }

  #badge() {
    const { points, total } = this.data;
    const odd = this.lines.reduce((all, one) => all + one.odd.length, 0);
    const text = total > points ? `${format.whole(points)} of ${format.whole(total)} points, extremes kept` : format.plural(total, "point");
    setText(this.at.badge, [this.lines.length ? text : "", odd ? `${odd} not a number` : ""].filter(Boolean).join(" · "));
  }

  /** Plot series of a line: its own, then its ghost; of a band, two. */
  #places() {
    let place = 1;
    return this.lines.map((one) => {
      const first = place;
      place += one.band || one.ghost ? 2 : 1;
      return [one, first, place - first];
    });
  }

  #show() {
    for (const [one, first, width] of this.#places()) {
      const shown = !this.hidden.has(one.id);
      for (let i = first; i < first + width; i++) if (this.plot.series[i].show !== shown) this.plot.setSeries(i, { show: shown });
    }
  }

  #legend() {
    this.at.legend.replaceChildren(...this.lines.map((one) =>
      h("button", { type: "button", "aria-pressed": String(!this.hidden.has(one.id)), dataset: { id: one.id }, onclick: (event) => this.#toggle(one.id, event.currentTarget) },
        one.swatch(), h("span.cut", { title: one.name }, one.name), h("output"))));
  }

  #toggle(id, button) {
    if (!this.hidden.delete(id)) this.hidden.add(id);
    press(button, !this.hidden.has(id));
    const others = (url.get("hide") ?? "").split(",").filter((name) => name && !name.startsWith(`${this.id}.`));
    url.set({ hide: [...others, ...[...this.hidden].map((name) => `${this.id}.${name}`)].join(",") });
    this.draw();
  }

  /** What the lines say at the cursor, or at their ends. */
  #values() {
    const index = this.plot.cursor.idx;
    return this.#places().map(([one, first]) => {
      const at = (column) => lastKnown(column, index ?? column.length - 1);
      if (one.band) return [one, [this.plot.data[first], this.plot.data[first + 1]].map((c) => this.spec.text(at(c))).join(" – ")];
      if (!one.share) return [one, this.spec.text(at(this.plot.data[first]))];
      const place = index === null ? Infinity : search(one.x, this.plot.data[0][index]);
      return [one, this.spec.text(lastKnown(one.share, place))];
    });
  }

  read(spoken = false) {
    if (!this.plot?.data) return;
    const values = this.#values();
    for (const [one, text] of values) setText($(`[data-id="${one.id}"] output`, this.at.legend), text);
    if (!spoken || this.plot.cursor.idx === null) return;
    const x = axisText(this.board.view.x, this.plot.data[0][this.plot.cursor.idx]);
    setText(this.at.say, `${this.board.view.x} ${x}: ${values.filter(([one]) => !this.hidden.has(one.id)).map(([one, text]) => `${one.name} ${text}`).join(", ")}`);
  }

  #press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const last = this.plot.data[0].length - 1;
    const jump = Math.max(1, Math.round(last / 100)) * by * (event.shiftKey ? 5 : 1);
    const index = clamp((this.plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + jump, 0, last);
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][index], "x"), top: this.plot.over.clientHeight / 2 });
    this.read(true);
  }

  #rows() {
    const x = this.plot.data[0];
    return this.#places().flatMap(([one, first]) => one.band
      ? [[`${one.name}, low`, this.plot.data[first]], [`${one.name}, high`, this.plot.data[first + 1]]]
      : [[one.name, one.share && one.share.length === x.length ? one.share : this.plot.data[first]]]);
  }

  #fill() {
    const x = this.plot.data[0];
    const every = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
    const picked = x.map((_, i) => i).filter((i) => i % every === 0 || i === x.length - 1);
    const columns = this.#rows();
    const axis = this.board.view.x;
    this.at["chart-table"].replaceChildren(
      table("table", `${$("h2", this.card).textContent} by ${AXES[axis]}`, [AXES[axis], ...columns.map(([name]) => name)].map((name) => `#${name}`),
        h("tbody", {}, picked.map((i) => h("tr", {}, h("th.num", { scope: "row" }, axisText(axis, x[i])), columns.map(([, c]) => h("td.num", {}, this.spec.text(lastKnown(c, i)))))))));
  }

  /** The points shown, as they are: not smoothed, gaps empty. */
  #csv() {
    const lines = this.lines.flatMap((one) => (one.band ? one.band.map(([x, y], i) => [`${one.name} ${i ? "high" : "low"}`, x, y]) : [[one.name, one.x, one.ghost ?? one.share ?? one.y]]));
    const data = uPlot.join(lines.map(([, x, y]) => [x, y]));
    const head = [this.board.view.x, ...lines.map(([name]) => name)].join(",");
    return [head, ...data[0].map((_, i) => data.map((c) => c[i] ?? "").join(","))].join("\n");
  }

  #save(name, blob) {
    const address = URL.createObjectURL(blob);
    h("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  #options(log) {
    const { board } = this;
    const still = { spanGaps: true, points: { show: false } };
    const series = [{}];
    const bands = [];
    for (const one of this.lines) {
      if (one.band) {
        bands.push({ series: [series.length + 1, series.length], fill: one.fill });
        series.push({ ...still, stroke: "transparent" }, { ...still, stroke: "transparent" });
        continue;
      }
      const points = one.points ? { show: true, size: one.width > 1.5 ? 7 : 5, fill: one.color, stroke: cssColor("--surface"), width: 1 } : { show: false };
      series.push({ ...still, stroke: one.color, width: one.width, dash: one.dash, points, fill: one.fill });
      if (one.ghost) series.push({ ...still, stroke: `${one.color}38`, width: 1 });
    }
    const wall = board.view.x === "wall";
    const texts = (text) => ({ values: (u, ticks) => format.axis(ticks, text) });
    const x = { ticks: { stroke: cssColor("--grid"), width: 1, size: 4 }, label: AXES[board.view.x], space: 64, ...(wall ? {} : texts((t) => axisText(board.view.x, t))) };
    const y = texts(this.spec.plain ? (t) => `${Math.round(t * 100)}%` : (this.spec.axis ?? format.short));
    return look(this.at.chart, x, y, {
      focus: { alpha: 1 },
      cursor: {
        y: false, points: { size: 6 }, drag: { x: true, y: false, dist: 6, setScale: false },
        bind: { dblclick: () => () => board.reset() },
        sync: { key: "overview", scales: ["x", null], filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
      },
      bands,
      scales: {
        x: { time: wall, distr: log.x ? 3 : 1, range: (u, low, high) => inSight(board.view, low, high) },
        y: {
          distr: log.y ? 3 : 1,
          range: (u, low, high) => {
            if (this.spec.plain) return [0, 1];
            if (this.usual) return pad(this.usual.low, this.usual.high, log.y);
            return low === null ? [0, 1] : pad(low, high, log.y);
          },
        },
      },
      series,
      hooks: {
        setCursor: [(u) => u.data && this.read()],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const ends = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          board.zoom(...ends);
        }],
        draw: [(u) => this.#marks(u)],
      },
    });
  }

  /** Where a value is no number, at the upper edge: there is no place on the y axis for it. */
  #marks(u) {
    const pen = u.ctx;
    pen.save();
    pen.fillStyle = cssColor("--s-failed");
    pen.textAlign = "center";
    pen.font = `${10 * devicePixelRatio}px ${cssColor("--font")}`;
    const size = 5 * devicePixelRatio;
    let right = -Infinity;
    for (const [x, kind] of this.lines.filter((one) => !this.hidden.has(one.id)).flatMap((one) => one.odd).sort((a, b) => a[0] - b[0])) {
      const at = u.valToPos(x, "x", true);
      if (at < u.bbox.left || at > u.bbox.left + u.bbox.width) continue;
      pen.beginPath();
      pen.moveTo(at - size, u.bbox.top);
      pen.lineTo(at + size, u.bbox.top);
      pen.lineTo(at, u.bbox.top + size * 1.7);
      pen.fill();
      if (at - right > 34 * devicePixelRatio) {
        pen.fillText(ODD[kind] ?? kind, at, u.bbox.top + size * 4);
        right = at;
      }
    }
    pen.restore();
  }
}

function cut(x, y) {
  const from = x.findIndex((v) => v > 0);
  return from > 0 ? [x.slice(from), y.slice(from)] : from < 0 ? [[], []] : [x, y];
}

/** The part of the x axis that is chosen, or all. */
function inSight({ from, to }, low, high) {
  if (from !== null && to !== null) return [from, to];
  return low === high ? [low - 0.5, high + 0.5] : [from ?? low, to ?? high];
}

function pad(low, high, log) {
  if (log) return [low / 1.15, high * 1.15];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function axisText(axis, x) {
  if (axis === "wall") return new Date(x * 1000).toLocaleTimeString([], { hourCycle: "h23" });
  if (axis === "relative") return format.duration(x);
  if (axis === "money") return format.money(x);
  if (axis === "round") return String(Math.round(x * 100) / 100);
  return format.count(x);
}
