// Who did what, when: a row per replica on the wall clock, lines where rounds were committed.
//
// The server answers a window with bars, or, when they are thinner than pixels, with a raster. The
// window moves at once with what there is, stretched, and is asked for again when it stands still.

import * as format from "../lib/format.js";
import { clamp, cssColor, darkScheme, h, marked, oncePerFrame, press, setText, table, timed, url } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";
import { groupColor, groupFill, key, pixel, raster, rgb, sizeCanvas } from "../lib/palette.js";

const LEFT = 44;
const TOP = 22;
const TALLEST = 560;
const ROW = { most: 26, least: 2 };
const STILL_MS = 70;
const LIVE_MS = 3000;
const TABLE_ROWS = 300;
const BLANK = 255;
const CLOSEST_S = 0.5;

export function timeline(context, card) {
  const { store, page } = context;
  const at = marked(card, "chart", "say", "badge", "legend", "earlier", "later", "closer", "farther", "all", "table", "chart-table");
  const canvas = h("canvas");
  at.chart.append(canvas);
  const number = (name) => Number(url.get(name)) || null;
  let view = { from: number("from_s"), to: number("to_s") }; // null: the ends of the data
  let data = null;
  let cells = null; // the raster: a byte for each column of each replica
  let image = null; // the same as a picture
  let timer = 0;
  let asked = 0;
  let question = 0;
  let cursor = null; // {x, replica}
  let drag = null;
  let listed = url.get("table") === "timeline";

  const ends = () => [view.from ?? data.first, view.to ?? data.last];
  const plotWidth = () => Math.max(at.chart.clientWidth - LEFT - 2, 50);
  const rowHeight = () => clamp(Math.floor(TALLEST / Math.max(data.replicas, 1)), ROW.least, ROW.most);
  /** The moment at a place of the canvas. */
  function moment(x) {
    const [from, to] = ends();
    return from + ((x - LEFT) / plotWidth()) * (to - from);
  }

  async function ask() {
    const mine = ++question;
    asked = performance.now();
    const query = new URLSearchParams({ columns: Math.min(Math.round(plotWidth()), 1200) });
    if (view.from !== null) query.set("from", view.from);
    if (view.to !== null) query.set("to", view.to);
    try {
      const answer = await getJSON(`${page.dataset.timelineData}?${query}`);
      if (mine !== question) return;
      data = answer;
      cells = data.cells ? Uint8Array.from(atob(data.cells), (c) => c.charCodeAt(0)) : null;
      image = cells && picture(data, cells);
      draw();
      requestAnimationFrame(() => timed("timeline", asked));
    } catch {
      asked = 0; // the connection's dot says how it is
    }
  }

  function soon(after) {
    clearTimeout(timer);
    timer = setTimeout(ask, after);
  }

  function show(from, to) {
    const closest = Math.max(to - from, CLOSEST_S);
    const middle = (from + to) / 2;
    [from, to] = [middle - closest / 2, middle + closest / 2];
    const whole = from <= data.first && to >= data.last;
    view = whole ? { from: null, to: null } : { from: Math.round(from * 1000) / 1000, to: Math.round(to * 1000) / 1000 };
    url.set({ from_s: view.from, to_s: view.to });
    draw();
    soon(STILL_MS);
  }

  function scaleBy(factor, part = 0.5) {
    const [from, to] = ends();
    const middle = from + (to - from) * part;
    show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }
  function pan(part) {
    const [from, to] = ends();
    const by = clamp((to - from) * part, data.first - from, Math.max(data.last - to, 0));
    show(from + by, to + by);
  }

  const draw = oncePerFrame(() => {
    if (!data) return;
    words();
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
      pen.drawImage(image, geometry.x(data.from), TOP, geometry.x(data.to) - geometry.x(data.from), data.replicas * row);
    } else bars(pen, geometry, data);
    commits(pen, geometry, data);
    pen.restore();
    if (cursor) mark(pen, geometry);
    if (drag) {
      pen.fillStyle = `${cssColor("--accent")}22`;
      pen.fillRect(Math.min(drag.from, drag.to), TOP, Math.abs(drag.to - drag.from), data.replicas * row);
    }
    if (data.replicas) delete at.chart.dataset.empty;
    else at.chart.dataset.empty = "The first bars appear when a round is committed";
    timed("timeline drawn", begun);
  });

  function words() {
    const { slowest, counted } = data;
    const scale = image ? `raster of ${format.whole(data.columns)} columns; zoom in for bars` : format.plural(data.bars.number.length, "bar");
    setText(at.badge, [scale, slowest && data.replicas > 1 ? `critical path: replica ${slowest[0]} was last in ${slowest[1]} of ${counted} rounds` : ""].filter(Boolean).join(" · "));
    setText(at.say, cursor ? reading() : "");
    for (const name of ["earlier", "later", "all"]) at[name].disabled = view.from === null;
    at["chart-table"].hidden = !listed;
    at.chart.hidden = listed;
    press(at.table, listed);
    if (listed) fill();
  }

  function reading() {
    const when = moment(cursor.x);
    const head = `Replica ${cursor.replica} at ${format.clock(when * 1000)}`;
    if (image) {
      const column = Math.floor(((when - data.from) / (data.to - data.from)) * data.columns);
      const cell = column >= 0 && column < data.columns ? cells[cursor.replica * data.columns + column] : BLANK;
      if (cell === BLANK) return `${head}: nothing known`;
      const share = (cell & 15) / 15;
      return `${head}: ${share < 0.05 ? "compute" : `${format.percent(share)} ${data.groups[cell >> 4]}`}`;
    }
    const i = barAt(when, cursor.replica);
    if (i < 0) return `${head}: ${data.groups.at(-1)}`;
    const { number, outcome, phases } = data.bars;
    return `${head}: round ${number[i]}, ${outcome[i] || "unknown"}: ${phases[i].map((ms, g) => (ms ? `${data.groups[g]} ${format.duration(ms / 1000)}` : "")).filter(Boolean).join(", ")}`;
  }

  function barAt(when, replica) {
    const ms = (when - data.from) * 1000;
    return data.bars.started.findIndex((began, i) => data.bars.replica[i] === replica && began <= ms && ms < ended(data.bars, i));
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
    if (image) return at["chart-table"].replaceChildren(h("p.empty-s", {}, "Too many bars for a table: zoom in."));
    const { number, replica, outcome, started, phases } = data.bars;
    const picked = number.map((_, i) => i).slice(-TABLE_ROWS).reverse();
    const groups = data.groups.slice(0, -1);
    at["chart-table"].replaceChildren(table("table", "Rounds of replicas in this window, newest first",
      ["#Round", "#Replica", "Outcome", "#Began", ...groups.map((group) => `#${group}`)],
      h("tbody", {}, picked.map((i) => h("tr", {}, h("th.num", { scope: "row" }, number[i]), h("td.num", {}, replica[i]), h("td", {}, outcome[i]),
        h("td.num", {}, format.clock(data.from * 1000 + started[i])), phases[i].map((ms) => h("td.num", {}, format.duration(ms / 1000))))))));
  }

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const replica = data ? Math.floor((event.clientY - box.top - TOP) / rowHeight()) : -1;
    const x = event.clientX - box.left;
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
    if (drag) drag.to = Math.max(event.clientX - canvas.getBoundingClientRect().left, LEFT);
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
  // With a modifier, as the page itself scrolls by the wheel.
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!data || !(event.ctrlKey || event.metaKey || sideways)) return;
    event.preventDefault();
    if (sideways) pan(event.deltaX / plotWidth());
    else scaleBy(1.0015 ** event.deltaY, Math.max(event.clientX - canvas.getBoundingClientRect().left - LEFT, 0) / plotWidth());
  }, { passive: false });
  at.chart.addEventListener("keydown", (event) => {
    if (!data || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => scaleBy(0.5), "-": () => scaleBy(2), Enter: open, ArrowUp: () => choose(-1), ArrowDown: () => choose(1), Home: () => show(data.first, data.last) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  function choose(by) {
    const replica = clamp((cursor?.replica ?? (by > 0 ? -1 : data.replicas)) + by, 0, data.replicas - 1);
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
    if (data) words();
    draw();
  });
  const recolour = () => {
    at.legend.replaceChildren(legend());
    if (cells) image = picture(data, cells);
    draw();
  };
  darkScheme.addEventListener("change", recolour);
  new ResizeObserver(draw).observe(at.chart);
  recolour();

  return (changed) => {
    if (!store.run || !card.offsetParent) return;
    if (!data || changed.has("tab")) ask();
    else if (changed.has("rounds") && view.to === null) soon(Math.max(0, asked + LIVE_MS - performance.now()));
  };
}

/** The raster as a canvas of one pixel per cell. */
function picture({ columns, replicas, groups }, cells) {
  const compute = rgb(groupColor("compute"));
  const colors = new Uint32Array(256);
  groups.forEach((group, kind) => {
    const other = rgb(groupColor(group));
    for (let share = 0; share < 16; share++) colors[kind * 16 + share] = pixel(compute.map((c, i) => Math.round(c + ((other[i] - c) * share) / 15)));
  });
  colors[BLANK] = 0;
  return raster(columns, Math.max(replicas, 1), Uint32Array.from(cells, (cell) => colors[cell]));
}

/** When a bar ends, in ms of the answer. */
const ended = ({ started, phases }, i) => phases[i].reduce((sum, ms) => sum + ms, started[i]);

function frame(pen, { from, to, width, row }, data) {
  pen.font = `11px ${cssColor("--font")}`;
  pen.textBaseline = "middle";
  pen.fillStyle = cssColor("--text-3");
  const every = Math.ceil(14 / row);
  pen.textAlign = "right";
  for (let r = 0; r < data.replicas; r += every) pen.fillText(String(r), LEFT - 8, TOP + r * row + row / 2);
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
  const step = steps.find((s) => (s / (to - from)) * width >= 76) ?? steps.at(-1) * Math.ceil((to - from) / steps.at(-1) / 8);
  pen.textAlign = "center";
  for (let t = Math.ceil(from / step) * step; t < to; t += step) {
    const x = LEFT + ((t - from) / (to - from)) * width;
    pen.fillStyle = cssColor("--grid");
    pen.fillRect(Math.round(x), TOP - 5, 1, data.replicas * row + 5);
    pen.fillStyle = cssColor("--text-3");
    const date = new Date(t * 1000);
    const text = step >= 86400 ? date.toLocaleDateString([], { day: "numeric", month: "short" }) : date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hourCycle: "h23" });
    if (x > LEFT + 20 && x < LEFT + width - 20) pen.fillText(text, x, 8);
  }
}

function bars(pen, { x, row }, data) {
  const { replica, started, phases } = data.bars;
  const gap = row > 8 ? 2 : 0;
  const wide = data.groups.map((group) => groupFill(pen, group));
  const thin = data.groups.map(groupColor);
  const down = data.groups.length - 1;
  const order = started.map((_, i) => i).sort((a, b) => replica[a] - replica[b] || started[a] - started[b]);
  let before = -1;
  for (const i of order) {
    const y = TOP + replica[i] * row;
    let s = data.from + started[i] / 1000;
    if (before >= 0 && replica[before] === replica[i]) {
      const end = data.from + ended(data.bars, before) / 1000;
      pen.fillStyle = thin[down];
      if (x(s) - x(end) > 0.5) pen.fillRect(x(end), y + row / 2 - 0.5, x(s) - x(end), 1);
    }
    before = i;
    phases[i].forEach((ms, group) => {
      if (!ms) return;
      const from = x(s);
      s += ms / 1000;
      pen.fillStyle = x(s) - from > 5 && row > 5 ? wide[group] : thin[group];
      pen.fillRect(from, y, Math.max(x(s) - from, 0.4), row - gap);
    });
  }
}

function commits(pen, { x, row, width, from, to }, data) {
  if (data.commits.length > width / 10) return;
  for (const [number, at, state] of data.commits) {
    const when = data.from + at;
    if (when < from || when > to) continue;
    const here = Math.round(x(when));
    pen.fillStyle = state === "void" ? cssColor("--s-failed") : cssColor("--text");
    pen.globalAlpha = data.commits.length > width / 42 ? 0.35 : 0.75;
    for (let y = TOP; y < TOP + data.replicas * row; y += state === "void" ? 6 : 1e9) pen.fillRect(here, y, 1, state === "void" ? 3 : data.replicas * row);
    pen.globalAlpha = 1;
    if (data.commits.length < width / 42) {
      pen.textAlign = "left";
      pen.font = `10px ${cssColor("--font")}`;
      const width = pen.measureText(String(number)).width;
      pen.fillStyle = cssColor("--surface");
      pen.globalAlpha = 0.85;
      pen.fillRect(here + 1, TOP, width + 4, 12);
      pen.globalAlpha = 1;
      pen.fillStyle = cssColor("--text-2");
      pen.fillText(String(number), here + 3, TOP + 6);
    }
  }
}

function legend() {
  const groups = ["compute", "upload", "wait", "apply", "other", "down"];
  return h("p.heat-legend", {},
    groups.map((group) => h("span", {}, key((pen) => groupFill(pen, group), 14, ...(group === "down" ? [5, 2] : [])), group === "down" ? "down, or between rounds" : group)),
    h("span", {}, "| round committed"));
}
