// A line chart: uPlot inside a card, with legend, table, keyboard and pointer reading.

import uPlot from "../lib/uplot.js";
import * as format from "../lib/format.js";
import { $, clamp, cssColor, h, isDark, marked, onTheme, press, setText, url } from "../lib/dom.js";
import { follow, look } from "../lib/plot.js";
import { AXES, axisText, padded, positivePart, visibleRange } from "./axes.js";
import { markNewest, markNotFinite, ODD } from "./chart_marks.js";
import { save, saveCsv, valuesTable } from "./chart_values.js";
import { lastKnown, notFinite, search, usual } from "./curves.js";
import { tooltip } from "./tooltip.js";

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
    this.at.csv?.addEventListener("click", () => saveCsv(this.id, board.view.x, this.lines));
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
      at.chart.dataset.empty = board.emptyText?.(this.spec) ?? this.spec.empty;
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
    if (listed) at["chart-table"].replaceChildren(this.#valuesTable());
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
    const part = log.x ? positivePart : (x, y) => [x, y];
    return uPlot.join(columns.map(([x, y]) => part(x, positive(y))));
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

  #valuesTable() {
    const { data } = this.plot;
    const columns = this.#places().flatMap(([{ name, band, share }, first]) => {
      if (band) return [[`${name}, low`, data[first]], [`${name}, high`, data[first + 1]]];
      return [[name, share?.length === data[0].length ? share : data[first]]];
    });
    const title = $("h2", this.card).textContent;
    return valuesTable(title, this.board.view.x, data[0], columns, this.spec.text);
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
          range: (u, low, high) => visibleRange(board.view, low, high),
        },
        y: {
          distr: log.y ? 3 : 1,
          range: (u, low, high) => {
            if (this.spec.plain) return [0, 1];
            if (this.usual) return padded(this.usual.low, this.usual.high, log.y);
            return low === null ? [0, 1] : padded(low, high, log.y);
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
        draw: [(u) => this.#mark(u), () => board.drawn?.(this)],
      },
    });
  }

  /** Draw what is not part of a line: values that are not finite, and the newest values. */
  #mark(u) {
    const odd = this.lines
      .filter((one) => !this.hidden.has(one.id)) // also of replicas that are not highlighted
      .flatMap((one) => (this.#shows(one) ? one.nan : one.odd));
    markNotFinite(u, odd);
    if (this.spec.plain || !this.board.highlighted) return;
    const lines = this.#places().filter(([one]) => !one.band && this.#shows(one));
    markNewest(u, lines, this.spec.text);
  }
}
