// A line chart: uPlot inside a card, with legend, table, keyboard and pointer reading.

import uPlot from "../lib/uplot.js";
import * as format from "../lib/format.js";
import {
  $,
  clamp,
  cssColor,
  h,
  isDark,
  marked,
  onTheme,
  press,
  setText,
  table,
  token,
  url,
} from "../lib/dom.js";
import { lastKnown, notFinite, search, usual } from "./curves.js";
import { tooltip } from "./tooltip.js";

export const AXES = {
  step: "inner step",
  round: "round",
  tokens: "tokens of all replicas",
  wall: "time",
  relative: "time since the first step",
  money: "US dollars",
};
const TABLE_ROWS = 200;
const ODD = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** Common plot options: frame size and page colours; `x` and `y` configure the axes. */
export function look(place, x, y, more) {
  const font = `11px ${token("--font")}`;
  const grid = { stroke: cssColor("--grid"), width: 1 };
  const axis = { stroke: cssColor("--text-3"), font, grid, ticks: { show: false }, gap: 6 };
  const horizontal = {
    ...axis,
    size: 28,
    gap: 4,
    labelFont: font,
    labelSize: 18,
    labelGap: 0,
    ...x,
  };
  return {
    // A hidden frame has no size; it is resized when shown.
    width: place.clientWidth || 600,
    height: place.clientHeight || 200,
    padding: [8, 18, 0, 0], // half of the last label of the axis
    legend: { show: false },
    axes: [horizontal, ...[y].flat().map((one) => ({ ...axis, size: 50, ...one }))],
    ...more,
  };
}

/** Resize the plot returned by `plot()` with its frame. */
export function follow(place, plot) {
  const resize = () => {
    const { clientWidth: width, clientHeight: height } = place;
    if (width) plot()?.setSize({ width, height });
  };
  new ResizeObserver(resize).observe(place);
}

/** The hidden lines of all charts in the address: "<chart>.<line>,...". */
const hiddenLines = () => (url.get("hide") ?? "").split(",").filter(Boolean);

/** Draws the lines of `spec` for `data` with the options of `board.view`. */
export class Chart {
  constructor(board, card, spec) {
    Object.assign(this, {
      board,
      card,
      spec,
      id: card.dataset.plot,
      data: null,
      lines: [],
      plot: null,
      shape: "",
    });
    this.at = marked(
      card,
      "chart",
      "legend",
      "announce",
      "chart-table",
      "table",
      "badge",
      "csv",
      "png",
    );
    const own = hiddenLines().filter((name) => this.#owns(name));
    this.hidden = new Set(own.map((name) => name.slice(this.id.length + 1)));
    this.at.table.addEventListener("click", () => board.toggleTable(this.id));
    this.at.csv?.addEventListener("click", () => this.#saveCsv());
    this.at.png?.addEventListener("click", () => this.#savePng());
    this.at.chart.addEventListener("keydown", (event) => this.#press(event));
    follow(this.at.chart, () => this.plot);
    onTheme(() => this.draw());
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
      at.chart.dataset.empty = board.ended?.()
        ? "The run ended without data for this chart"
        : this.spec.empty;
      at.legend.replaceChildren();
      this.plot?.destroy();
      this.plot = null;
      return;
    }
    const log = this.#log();
    const data = this.#joined(log);
    const drawn = this.lines.filter((one) => this.#shows(one));
    const diverged = drawn.some((one) => !one.band && notFinite(one, one.x, one.y, Infinity));
    const clips = (board.view.clip ?? diverged) && !this.spec.plain;
    const shown = drawn.flatMap((one) => one.band?.map(([, y]) => y) ?? [one.ghost ?? one.y]);
    this.usual = clips ? usual(shown, diverged) : null;
    const kinds = this.lines.map((one) => [one.id, Boolean(one.ghost), one.points]);
    const wanted = JSON.stringify([kinds, board.view.x, log, isDark()]);
    if (this.plot && wanted === this.shape) this.plot.setData(data);
    else {
      this.plot?.destroy();
      this.tip = null;
      this.plot = new uPlot(this.#options(log), data, at.chart);
      this.shape = wanted;
      this.#legend();
    }
    this.#show();
    this.read();
    if (listed) this.#fill();
  }

  /** Lines of replicas are drawn when they are highlighted, if the board has a legend for that. */
  #shows(one) {
    // Without a band, all lines are drawn.
    const highlighted = this.data.band && this.board.highlighted;
    return (
      !this.hidden.has(one.id) &&
      !(highlighted && one.replica !== undefined && !highlighted.has(one.replica))
    );
  }

  /** Draw without data being changed: another replica is highlighted, for example. */
  restyle() {
    if (this.plot) this.draw();
  }

  /** The frame of the plot in CSS pixels and its range: what the strip of rounds aligns with. */
  frame() {
    if (!this.plot || !this.card.offsetParent) return null;
    const { bbox, scales } = this.plot;
    const [left, width] = [bbox.left / devicePixelRatio, bbox.width / devicePixelRatio];
    const offset = this.at.chart.getBoundingClientRect().left;
    return { left: left + offset, width, min: scales.x.min, max: scales.x.max };
  }

  clipped() {
    return this.usual?.clipped ?? 0;
  }

  /** Whether the entry of `hiddenLines` belongs to this chart. */
  #owns(name) {
    return name.startsWith(`${this.id}.`);
  }

  /** Which axes are logarithmic. */
  #log() {
    const { x, logx, logy } = this.board.view;
    return { y: logy && !this.spec.plain, x: logx && !["wall", "relative"].includes(x) };
  }

  /** The columns of the plot: x of all lines, then the columns of each line (see `#places`). */
  #joined(log) {
    const columns = this.lines.flatMap(({ x, y, ghost, band }) => {
      return band ?? (ghost ? [[x, y], [x, ghost]] : [[x, y]]);
    });
    const positive = (y) => (log.y ? y.map((v) => (v > 0 ? v : null)) : y);
    return uPlot.join(columns.map(([x, y]) => (log.x ? cut(x, positive(y)) : [x, positive(y)])));
  }

  #badge() {
    const { points, total } = this.data;
    const odd = this.lines.reduce((all, one) => all + one.odd.length, 0);
    const text = total > points
      ? `${format.whole(points)} of ${format.whole(total)} points (extremes kept)`
      : format.plural(total, "point");
    const notes = [this.lines.length && text, odd && `${odd} NaN`];
    setText(this.at.badge, notes.filter(Boolean).join(" · "));
  }

  /** Plot series of a line: the line, then its unsmoothed values; of a band, two. */
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
      const show = this.#shows(one);
      for (let i = first; i < first + width; i++) {
        if (this.plot.series[i].show !== show) this.plot.setSeries(i, { show });
      }
    }
  }

  #legend() {
    this.at.legend.replaceChildren(...this.lines.map(({ id, name, swatch, replica }) => {
      const onclick = (event) => this.#toggle(id, event.currentTarget);
      const isHighlighted = this.data.band && this.board.highlighted && replica !== undefined;
      const shared = isHighlighted ? { replica } : {};
      const button = h("button", { type: "button", dataset: { id, ...shared }, onclick },
        swatch(), h("span.cut", { title: name }, name), h("output"));
      press(button, !this.hidden.has(id));
      return button;
    }));
  }

  #toggle(id, button) {
    if (!this.hidden.delete(id)) this.hidden.add(id);
    press(button, !this.hidden.has(id));
    const others = hiddenLines().filter((name) => !this.#owns(name));
    const own = [...this.hidden].map((line) => `${this.id}.${line}`);
    url.set({ hide: [...others, ...own].join(",") });
    this.draw();
  }

  /** Values of the lines at the cursor, or their last values. */
  #values() {
    const { data, cursor } = this.plot;
    const index = cursor.idx ?? Infinity;
    const text = (column, i = index) => this.spec.text(lastKnown(column, i));
    return this.#places().map(([one, first]) => {
      const kind = notFinite(one, data[0], data[first], index);
      if (kind) return [one, ODD[kind]];
      if (one.band) return [one, `${text(data[first])} – ${text(data[first + 1])}`];
      if (!one.share) return [one, text(data[first])];
      return [one, text(one.share, cursor.idx === null ? Infinity : search(one.x, data[0][index]))];
    });
  }

  read(spoken = false) {
    if (!this.plot?.data) return;
    const values = this.#values();
    for (const [one, text] of values)
      setText($(`[data-id="${one.id}"] output`, this.at.legend), text);
    this.#point(values);
    if (!spoken || this.plot.cursor.idx === null) return;
    const axis = this.board.view.x;
    const x = axisText(axis, this.plot.data[0][this.plot.cursor.idx]);
    const shown = values.filter(([one]) => this.#shows(one));
    const lines = shown.map(([one, text]) => `${one.name} ${text}`).join(", ");
    setText(this.at.announce, `${axis} ${x}: ${lines}`);
  }

  /** The tooltip at the cursor. The charts of a board share the cursor; only one has the pointer.
   * */
  #point(values) {
    const { cursor, data, over } = this.plot;
    this.tip ??= tooltip(over);
    if (cursor.idx === null || cursor.left < 0 || !over.matches(":hover")) return this.tip.hide();
    const rows = values
      .filter(([one]) => this.#shows(one))
      .map(([one, text], i) => {
        const [, first] = this.#places().find(([other]) => other === one);
        const value = one.band ? null : lastKnown(one.share ?? data[first], cursor.idx);
        return { name: one.name, text, value, swatch: one.swatch, i };
      });
    return this.tip.show(
      cursor,
      `${this.board.view.x} ${axisText(this.board.view.x, data[0][cursor.idx])}`,
      rows,
    );
  }

  #press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const last = this.plot.data[0].length - 1;
    const jump = Math.max(1, Math.round(last / 100)) * by * (event.shiftKey ? 5 : 1);
    const index = clamp((this.plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + jump, 0, last);
    const left = this.plot.valToPos(this.plot.data[0][index], "x");
    this.plot.setCursor({ left, top: this.plot.over.clientHeight / 2 });
    this.read(true);
  }

  /** Name and values of each column of the table. */
  #columns() {
    const { data } = this.plot;
    return this.#places().flatMap(([{ name, band, share }, first]) => {
      if (band) return [[`${name}, low`, data[first]], [`${name}, high`, data[first + 1]]];
      return [[name, share?.length === data[0].length ? share : data[first]]];
    });
  }

  #fill() {
    const x = this.plot.data[0];
    const every = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
    const picked = x.map((_, i) => i).filter((i) => i % every === 0 || i === x.length - 1);
    const columns = this.#columns();
    const axis = this.board.view.x;
    const caption = `${$("h2", this.card).textContent} by ${AXES[axis]}`;
    const heads = [AXES[axis], ...columns.map(([name]) => name)].map((name) => `#${name}`);
    const cell = (column, i) => h("td.num", {}, this.spec.text(lastKnown(column, i)));
    const rows = picked.map((i) => h("tr", {},
      h("th.num", { scope: "row" }, axisText(axis, x[i])),
      columns.map(([, column]) => cell(column, i))));
    this.at["chart-table"].replaceChildren(table("table", caption, heads, h("tbody", {}, rows)));
  }

  /** Save the visible points, unsmoothed; gaps are empty. */
  #saveCsv() {
    const lines = this.lines.flatMap(({ name, x, y, band, ghost, share }) => {
      if (band) return [[`${name} low`, ...band[0]], [`${name} high`, ...band[1]]];
      return [[name, x, ghost ?? share ?? y]];
    });
    const data = uPlot.join(lines.map(([, x, y]) => [x, y]));
    const rows = data[0].map((_, i) => data.map((column) => column[i] ?? ""));
    const head = [this.board.view.x, ...lines.map(([name]) => name)];
    const text = [head, ...rows].map((row) => row.join(",")).join("\n");
    save(`${this.id}.csv`, new Blob([text], { type: "text/csv" }));
  }

  #savePng() {
    this.plot?.ctx.canvas.toBlob((blob) => save(`${this.id}.png`, blob));
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
      const { color, width, dash, fill } = one;
      const size = width > 1.5 ? 7 : 5;
      const points = {
        show: Boolean(one.points),
        size,
        fill: color,
        stroke: cssColor("--surface"),
        width: 1,
      };
      series.push({ ...still, stroke: color, width, dash, points, fill });
      if (one.ghost) series.push({ ...still, stroke: `${one.color}38`, width: 1 });
    }
    const wall = board.view.x === "wall";
    const texts = (text) => ({ values: (u, ticks) => format.axis(ticks, text) });
    const x = {
      ticks: { stroke: cssColor("--grid"), width: 1, size: 4 },
      label: wall ? `${AXES.wall} (${format.zone()})` : AXES[board.view.x],
      space: wall ? 96 : 64,
      ...(wall
        ? { values: (u, ticks) => format.timeTicks(ticks) }
        : texts((t) => axisText(board.view.x, t))),
    };
    const y = texts(
      this.spec.plain ? (t) => `${Math.round(t * 100)}%` : (this.spec.axis ?? format.short),
    );
    return look(this.at.chart, x, y, {
      focus: { alpha: 1 },
      cursor: {
        y: false,
        points: { size: 6 },
        drag: { x: true, y: false, dist: 6, setScale: false },
        bind: { dblclick: () => () => board.reset() },
        sync: {
          key: "overview",
          scales: ["x", null],
          filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" },
        },
      },
      bands,
      scales: {
        x: {
          time: wall,
          distr: log.x ? 3 : 1,
          range: (u, low, high) => inSight(board.view, low, high),
        },
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
        setSelect: [
          (u) => {
            if (u.select.width < 4) return;
            const ends = [
              u.posToVal(u.select.left, "x"),
              u.posToVal(u.select.left + u.select.width, "x"),
            ];
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            board.zoom(...ends);
          },
        ],
        draw: [(u) => this.#marks(u), (u) => this.#ends(u), () => board.drawn?.(this)],
      },
    });
  }

  /** The newest value of each shown line at its end, where there is room. */
  #ends(u) {
    if (this.spec.plain || !this.board.highlighted) return;
    const pen = u.ctx;
    pen.save();
    pen.font = `500 ${11 * devicePixelRatio}px ${token("--font")}`;
    pen.textAlign = "right";
    pen.textBaseline = "bottom";
    const tall = 14 * devicePixelRatio;
    const used = [];
    const lines = this.#places().filter(([one]) => !one.band && this.#shows(one)).reverse();
    for (const [one, first] of lines.slice(0, 4)) {
      const column = u.data[first];
      const value = lastKnown(column, column.length - 1);
      if (value === null || !(value >= u.scales.y.min && value <= u.scales.y.max)) continue;
      const y = Math.max(u.valToPos(value, "y", true) - 3 * devicePixelRatio, u.bbox.top + tall);
      if (used.some((other) => Math.abs(other - y) < tall)) continue;
      used.push(y);
      const x = u.bbox.left + u.bbox.width - 4 * devicePixelRatio;
      pen.lineWidth = 3 * devicePixelRatio;
      pen.strokeStyle = cssColor("--surface");
      pen.strokeText(this.spec.text(value), x, y);
      pen.fillStyle = one.color;
      pen.fillText(this.spec.text(value), x, y);
    }
    pen.restore();
  }

  /** Mark NaN values at the upper edge, as they have no place on the y axis: a stretch of them
   * once. */
  #marks(u) {
    const pen = u.ctx;
    pen.save();
    pen.fillStyle = cssColor("--s-failed");
    pen.textAlign = "center";
    pen.font = `${10 * devicePixelRatio}px ${token("--font")}`;
    const size = 5 * devicePixelRatio;
    const { left, top, width } = u.bbox;
    const places = this.lines
      .filter((one) => !this.hidden.has(one.id)) // also of replicas that are not highlighted
      .flatMap((one) => (this.#shows(one) ? one.nan : one.odd))
      .map(([x, kind]) => ({ from: u.valToPos(x, "x", true), kind }))
      .filter(({ from }) => from >= left && from <= left + width);
    let free = left; // where the last label ends
    for (const { from, to, kind } of stretches(places, 4 * size)) {
      pen.beginPath();
      pen.moveTo(from - size, top);
      pen.lineTo(to + size, top);
      pen.lineTo(to, top + size * 1.7);
      pen.lineTo(from, top + size * 1.7);
      pen.fill();
      const text = ODD[kind] ?? kind;
      const half = pen.measureText(text).width / 2 + size / 2;
      const middle = clamp((from + to) / 2, left + half, left + width - half);
      if (middle - half < free) continue;
      free = middle + half;
      pen.fillStyle = cssColor("--surface");
      pen.fillRect(middle - half, top + size * 2.2, 2 * half, size * 3);
      pen.fillStyle = cssColor("--s-failed");
      pen.fillText(text, middle, top + size * 4);
    }
    pen.restore();
  }
}

/** Neighbouring places of one kind, nearer than `gap`, as one {from, to, kind}. */
function stretches(places, gap) {
  const joined = [];
  for (const { from, kind } of places.sort((a, b) => a.from - b.from)) {
    const last = joined.at(-1);
    if (last?.kind === kind && from - last.to < gap) last.to = from;
    else joined.push({ from, to: from, kind });
  }
  return joined;
}

function save(name, blob) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}

/** The part of a line where x > 0. */
function cut(x, y) {
  const from = x.findIndex((v) => v > 0);
  return from > 0 ? [x.slice(from), y.slice(from)] : from < 0 ? [[], []] : [x, y];
}

/** The selected range of the x axis, or all of it. */
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
  if (axis === "wall") return format.clock(x * 1000, { seconds: true });
  if (axis === "relative") return format.duration(x);
  if (axis === "money") return format.money(x);
  if (axis === "round") return String(Math.round(x * 100) / 100);
  return format.count(x);
}
