// Timeline: one row per replica over wall-clock time, vertical lines at commits.
//
// The server returns bars for a window, or a raster when bars would be thinner than pixels. Moving
// the window stretches the loaded image; it is fetched again when the window stops.

import * as format from "../lib/format.js";
import {
  $,
  clamp,
  cssColor,
  h,
  isShown,
  marked,
  onTheme,
  press,
  setText,
  table,
  timed,
  url,
} from "../lib/dom.js";
import { oncePerFrame } from "../lib/frames.js";
import { getJSON } from "../lib/live.js";
import { RUN_ENDED } from "../lib/states.js";
import {
  bars,
  BLANK,
  commits,
  ended,
  frame,
  LEFT,
  legend,
  picture,
  TOP,
} from "./timeline_drawing.js";
import { sizeCanvas } from "../lib/palette.js";

const TALLEST = 560;
const ROW = { most: 26, least: 2 };
const STILL_MS = 70;
const LIVE_MS = 3000;
const MOST_COLUMNS = 2000; // more are stretched
const TABLE_ROWS = 300;
const CLOSEST_S = 0.5;
const ZOOMS = ["earlier", "later", "closer", "farther", "all"];

export function timeline(context, card) {
  const { store, page } = context;
  const at = marked(card, "chart", "announce", "badge", "legend", "table", "chart-table", ...ZOOMS);
  const canvas = h("canvas");
  const room = $("svg", at.chart); // of the final size
  canvas.style.height = `${room.getAttribute("height")}px`;
  room.replaceWith(canvas);
  const number = (name) => Number(url.get(name)) || null;
  const addressed = () => ({ from: number("from_s"), to: number("to_s") });
  let view = addressed(); // null: the whole range
  let data = null;
  let cells = null; // raster: one byte per column and replica
  let image = null; // the raster as an image
  let timer = 0;
  let asked = 0;
  let question = 0;
  let cursor = null; // {x, replica}
  let drag = null;
  let listed = url.get("table") === "timeline";

  const ends = () => [view.from ?? data.first, view.to ?? data.last];
  const plotWidth = () => Math.max(at.chart.clientWidth - LEFT - 2, 50);
  const rowHeight = () =>
    clamp(Math.floor(TALLEST / Math.max(data.replicas, 1)), ROW.least, ROW.most);
  /** The time at a canvas x coordinate. */
  function moment(x) {
    const [from, to] = ends();
    return from + ((x - LEFT) / plotWidth()) * (to - from);
  }

  async function ask() {
    const current = ++question;
    asked = performance.now();
    const query = new URLSearchParams({ columns: Math.min(plotWidth(), MOST_COLUMNS) });
    if (view.from !== null) query.set("from", view.from);
    if (view.to !== null) query.set("to", view.to);
    try {
      const answer = await getJSON(`${page.dataset.timelineData}?${query}`);
      if (current !== question) return;
      data = answer;
      cells = data.cells ? Uint8Array.from(atob(data.cells), (c) => c.charCodeAt(0)) : null;
      image = cells && picture(data, cells);
      draw();
      requestAnimationFrame(() => timed("timeline", asked));
    } catch {
      asked = 0; // the connection indicator shows the state
    }
  }

  function soon(after) {
    clearTimeout(timer);
    timer = setTimeout(ask, after);
  }

  /** `push`: the browser's Back returns to the window before. */
  function show(from, to, { push = true } = {}) {
    const closest = Math.max(to - from, CLOSEST_S);
    const middle = (from + to) / 2;
    [from, to] = [middle - closest / 2, middle + closest / 2];
    const whole = from <= data.first && to >= data.last;
    const end = (seconds) => (whole ? null : Math.round(seconds * 1000) / 1000);
    const first = view.from === null; // moving on replaces the entry that the first zoom made
    view = { from: end(from), to: end(to) };
    url.set({ from_s: view.from, to_s: view.to }, { push: push || first });
    draw();
    soon(STILL_MS);
  }

  addEventListener("popstate", () => {
    const before = JSON.stringify(view);
    view = addressed();
    if (!data || before === JSON.stringify(view)) return;
    draw();
    soon(STILL_MS);
  });

  function scaleBy(factor, part = 0.5, push = true) {
    const [from, to] = ends();
    const middle = from + (to - from) * part;
    show(middle - (middle - from) * factor, middle + (to - middle) * factor, { push });
  }
  function pan(part) {
    const [from, to] = ends();
    const by = clamp((to - from) * part, data.first - from, Math.max(data.last - to, 0));
    show(from + by, to + by, { push: false });
  }

  const draw = oncePerFrame(() => {
    if (!data) return;
    summary();
    if (!at.chart.clientWidth) return;
    const begun = performance.now();
    const [from, to] = ends();
    const width = plotWidth();
    const row = rowHeight();
    const pen = sizeCanvas(canvas, LEFT + width + 2, TOP + data.replicas * row + 4);
    const geometry = { from, to, width, row, x: (s) => LEFT + ((s - from) / (to - from)) * width };
    frame(pen, geometry, data);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, width, data.replicas * row);
    pen.clip();
    if (image) {
      pen.imageSmoothingEnabled = false;
      const left = geometry.x(data.from);
      pen.drawImage(image, left, TOP, geometry.x(data.to) - left, data.replicas * row);
    } else bars(pen, geometry, data);
    commits(pen, geometry, data);
    pen.restore();
    if (cursor) mark(pen, geometry);
    if (drag) {
      pen.fillStyle = `${cssColor("--accent")}22`;
      pen.fillRect(
        Math.min(drag.from, drag.to),
        TOP,
        Math.abs(drag.to - drag.from),
        data.replicas * row,
      );
    }
    if (data.replicas) delete at.chart.dataset.empty;
    else {
      at.chart.dataset.empty = RUN_ENDED.has(store.run?.state)
        ? "The run ended before a replica finished a round"
        : "Bars appear after the first committed round";
    }
    timed("timeline drawn", begun);
  });

  function summary() {
    const notes = [
      image
        ? `raster of ${format.whole(data.columns)} columns; zoom in for bars`
        : format.plural(data.bars.number.length, "bar"),
    ];
    if (data.slowest && data.replicas > 1) {
      const [replica, rounds] = data.slowest;
      notes.push(
        `critical path: replica ${replica} was last in ${rounds} of ${data.counted} rounds`,
      );
    }
    setText(at.badge, notes.join(" · "));
    setText(at.announce, cursor ? reading() : "");
    for (const name of ["earlier", "later", "all"]) at[name].disabled = view.from === null;
    at["chart-table"].hidden = !listed;
    at.chart.hidden = listed;
    press(at.table, listed);
    if (listed) fill();
  }

  function reading() {
    const when = moment(cursor.x);
    const head = `Replica ${cursor.replica} at ${format.clock(when * 1000, { seconds: true })}`;
    if (image) {
      const column = Math.floor(((when - data.from) / (data.to - data.from)) * data.columns);
      const cell =
        column >= 0 && column < data.columns
          ? cells[cursor.replica * data.columns + column]
          : BLANK;
      if (cell === BLANK) return `${head}: no data`;
      const share = (cell & 15) / 15;
      if (share < 0.05) return `${head}: compute`;
      return `${head}: ${format.percent(share)} ${data.groups[cell >> 4]}`;
    }
    const i = barAt(when, cursor.replica);
    if (i < 0) return `${head}: ${data.groups.at(-1)}`;
    const { number, outcome, phases } = data.bars;
    const times = phases[i].map((ms, g) => ms && `${data.groups[g]} ${format.duration(ms / 1000)}`);
    const shown = times.filter(Boolean).join(", ");
    return `${head}: round ${number[i]}, ${outcome[i] || "unknown"}: ${shown}`;
  }

  function barAt(when, replica) {
    const { bars } = data;
    const ms = (when - data.from) * 1000;
    const covers = (began, i) => bars.replica[i] === replica && began <= ms && ms < ended(bars, i);
    return bars.started.findIndex(covers);
  }

  function open() {
    if (!cursor) return;
    const [from, to] = ends();
    const when = moment(cursor.x);
    if (image) return show(when - (to - from) / 12, when + (to - from) / 12);
    const i = barAt(when, cursor.replica);
    if (i >= 0) context.select(data.bars.number[i]);
  }

  function mark(pen, { row }) {
    pen.strokeStyle = cssColor("--text");
    pen.lineWidth = 1;
    pen.strokeRect(LEFT - 0.5, TOP + cursor.replica * row - 0.5, plotWidth() + 1, row);
    pen.fillStyle = cssColor("--text-3");
    pen.fillRect(Math.round(cursor.x), TOP, 1, data.replicas * row);
  }

  function fill() {
    if (image)
      return at["chart-table"].replaceChildren(
        h("p.empty-s", {}, "Too many bars for a table. Zoom in."),
      );
    const { number, replica, outcome, started, phases } = data.bars;
    const picked = number.map((_, i) => i).slice(-TABLE_ROWS).reverse();
    const groups = data.groups.slice(0, -1);
    const columns = [
      "#Round",
      "#Replica",
      "Outcome",
      "#Began",
      ...groups.map((group) => `#${group}`),
    ];
    const rows = picked.map((i) =>
      h(
        "tr",
        {},
        h("th.num", { scope: "row" }, number[i]),
        h("td.num", {}, replica[i]),
        h("td", {}, outcome[i]),
        h("td.num", {}, format.clock(data.from * 1000 + started[i], { seconds: true })),
        phases[i].map((ms) => h("td.num", {}, format.duration(ms / 1000))),
      ),
    );
    const caption = "Rounds of replicas in this window, newest first";
    at["chart-table"].replaceChildren(table("table", caption, columns, h("tbody", {}, rows)));
  }

  const canvasX = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const place = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top;
    const replica = data ? Math.floor((y - TOP) / rowHeight()) : -1;
    const x = canvasX(event);
    return replica >= 0 && replica < data.replicas && x >= LEFT ? { x, replica } : null;
  };
  canvas.addEventListener("pointerdown", (event) => {
    const spot = place(event);
    if (!spot || event.button) return;
    drag = { from: spot.x, to: spot.x };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    cursor = place(event);
    if (drag) drag.to = Math.max(canvasX(event), LEFT);
    draw();
  });
  canvas.addEventListener("pointerup", () => {
    if (!drag) return;
    const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
    drag = null;
    if (to - from < 5) open();
    else show(moment(from), moment(to));
  });
  canvas.addEventListener("pointerleave", () => {
    if (!drag) cursor = null;
    draw();
  });
  // Needs a modifier key, because the wheel scrolls the page.
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!data || !(event.ctrlKey || event.metaKey || sideways)) return;
    event.preventDefault();
    if (sideways) pan(event.deltaX / plotWidth());
    else scaleBy(1.0015 ** event.deltaY, Math.max(canvasX(event) - LEFT, 0) / plotWidth(), false);
  }, { passive: false });
  const KEYS = {
    ArrowLeft: () => pan(-0.2),
    ArrowRight: () => pan(0.2),
    ArrowUp: () => choose(-1),
    ArrowDown: () => choose(1),
    "+": () => scaleBy(0.5, 0.5, false),
    "-": () => scaleBy(2, 0.5, false),
    Home: () => show(data.first, data.last),
    Enter: open,
  };
  at.chart.addEventListener("keydown", (event) => {
    if (!data || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  function choose(by) {
    const replica = clamp(
      (cursor?.replica ?? (by > 0 ? -1 : data.replicas)) + by,
      0,
      data.replicas - 1,
    );
    cursor = { x: cursor?.x ?? LEFT + plotWidth() / 2, replica };
    draw();
  }
  at.earlier.addEventListener("click", () => pan(-0.5));
  at.later.addEventListener("click", () => pan(0.5));
  at.closer.addEventListener("click", () => data && scaleBy(0.5));
  at.farther.addEventListener("click", () => data && scaleBy(2));
  at.all.addEventListener("click", () => data && show(data.first, data.last));
  at.table.addEventListener("click", () => {
    listed = !listed;
    url.set({ table: listed ? "timeline" : null });
    if (data) summary();
    draw();
  });
  const recolour = () => {
    at.legend.replaceChildren(legend());
    if (cells) image = picture(data, cells);
    draw();
  };
  onTheme(recolour);
  new ResizeObserver(draw).observe(at.chart);
  recolour();

  return (changed) => {
    if (!store.run || !isShown(card)) return;
    if (!data || changed.has("tab")) ask();
    else if (changed.has("rounds") && view.to === null)
      soon(Math.max(0, asked + LIVE_MS - performance.now()));
  };
}
