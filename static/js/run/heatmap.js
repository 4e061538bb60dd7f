// Replica x round: the outcome of each contribution, on a canvas. Arrow keys read cells; Enter or a
// click opens the round. Every outcome has a shape as well as a colour.
//
// With fragments, a column can be one cycle of all fragments, each in its own lane under the
// replica, or the rounds of one fragment.
//
// Only visible columns are drawn, so 5,000 rounds scroll smoothly. Small cells are drawn as a
// raster; a pixel that covers several rounds shows the worst outcome.

import * as format from "../lib/format.js";
import {
  $,
  $$,
  calm,
  clamp,
  cssColor,
  h,
  isShown,
  onTheme,
  setText,
  timed,
  token,
  url,
} from "../lib/dom.js";
import { oncePerFrame } from "../lib/frames.js";
import { hatch, pixel, raster, rgb, sizeCanvas } from "../lib/palette.js";
import { OUTCOMES, RoundGrid, WHY } from "./grid.js";
import { RUN_ENDED } from "../lib/states.js";

const SIZES = {
  small: { cell: 17, least: 7, tallest: 300 },
  large: { cell: 30, least: 9, tallest: 560 },
};
const ABOUT =
  "Outcome of each replica in each round. " +
  "Arrow keys read it, Enter opens a round, plus and minus zoom.";
const GAP = 2;
const HEAD = 18; // height of the round numbers
const STRIP = 26; // height of the contribution count
const RASTER = 6; // cells smaller than this (px) are drawn as a raster
const LANE = 5; // minimum lane height (px)
const ROW = 19; // height of a row of the small map (px), if there is room
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

export function heatmap(context, card) {
  const { store, page } = context;
  const large = card.dataset.heatmap === "large";
  const size = SIZES[card.dataset.heatmap];
  const top = HEAD + (large ? STRIP : 0);
  const body = card.querySelector(".card-body");
  const names = $(".heat-names", body);
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": ABOUT });
  const spacer = $(".heat-space", body); // the server gives it its final size in advance
  const scroller = spacer.parentElement;
  const room = $("svg", spacer);
  spacer.style.height = `${room.getAttribute("height")}px`;
  room.replaceWith(canvas);
  const announcement = $(".heat-announce", body);
  const labels = legend(body);
  const smallRow = (rows) => clamp(Math.floor((size.tallest - top) / Math.max(rows, 1)), 1, ROW);
  const grid = (context.grid ??= new RoundGrid(store, page.dataset.heatmapData));
  let look = null; // current geometry: cell pitch, columns
  let cursor = null; // {replica, column}
  let follow = true;
  const addressed = () => Number(url.get("pitch")) || null;
  let zoom = large ? addressed() : null; // pixels per round; null: fit to width
  if (large) {
    zoomButtons(card, (factor) => setZoom(factor));
    addEventListener("popstate", () => {
      zoom = addressed();
      draw();
    });
  }
  const split = $("[data-split]", card); // all, lanes, or a fragment number
  const fragments = Number(split?.dataset.split) || 1;
  if (split) split.value = url.get("fragment") ?? "";

  const draw = oncePerFrame(() => {
    if (!store.run || !isShown(card)) return;
    const begun = performance.now();
    grid.update();
    const replicas = grid.replicas;
    fit(names, replicas); // first: it takes its width from that of the scroller
    const width = Math.max(scroller.clientWidth, 60);
    if (split && !split.value)
      split.value = replicas.length * fragments * LANE < size.tallest ? "lanes" : "all";
    const lanes = split?.value === "lanes" ? fragments : 1;
    const step = split && split.value !== "all" ? fragments : 1;
    const begin = step > 1 ? (Number(split.value) || 0) - ((grid.number(0) || 1) - 1) % step : 0;
    const first = (grid.number(0) || 1) + begin; // the round of the first column
    // The cursor keeps its round when older rounds arrive.
    if (cursor && look?.step === step) cursor.column += Math.round((look.first - first) / step);
    const rows = replicas.length * lanes;
    const known = Math.ceil((grid.count - begin) / step);
    const pitch = size.cell + GAP;
    const expected = Math.ceil(store.run.total_rounds / step);
    const columns = Math.max(known, Math.min(expected, Math.floor(width / pitch)));
    const fits = clamp(Math.floor(width / columns), size.least + GAP, pitch);
    const x = clamp(zoom ?? fits, width / columns, pitch);
    const tallest = Math.floor((size.tallest - top) / Math.max(rows, 1));
    // Not that of the columns: the server knows the height in advance, but not the width.
    const y = large ? clamp(tallest, 1, pitch) : smallRow(rows);
    look = {
      replicas, columns, known, lanes, step, begin, first, rows, x, y,
      width: Math.min(width, Math.ceil(columns * x)),
      height: top + rows * y + 1,
      raster: Math.min(x, y) < RASTER,
    };
    spacer.style.width = `${columns * x}px`;
    spacer.style.height = `${look.height}px`;
    if (follow) scroller.scrollLeft = scroller.scrollWidth;
    look.left = scroller.scrollLeft;
    paint();
    label(names, replicas, y * lanes, top);
    speak();
    timed(`heatmap drawn ${card.dataset.heatmap}`, begun);
  });

  /** Index of a column's round: of its first lane, or of the given lane. */
  const round = (column, lane = 0) => column * look.step + look.begin + lane;
  const code = (column, row) =>
    grid.code(round(column, row % look.lanes), Math.floor(row / look.lanes));

  function paint() {
    const { x, y, left, width, height, rows, lanes } = look;
    const pen = sizeCanvas(canvas, width, height);
    const first = Math.floor(left / x);
    const last = Math.min(Math.ceil((left + width) / x), look.columns);
    const at = (i) => i * x - left;
    if (look.raster) pixels(pen, first, last);
    else {
      const looks = styles(pen);
      for (let i = first; i < last; i++) {
        for (let k = 0; k < rows; k++)
          cell(pen, at(i), top + k * y, x - GAP, y - GAP, OUTCOMES[code(i, k)], looks);
      }
    }
    pen.fillStyle = cssColor("--text-3");
    for (let k = lanes; lanes > 1 && k < rows; k += lanes) {
      pen.fillRect(0, top + k * y - (look.raster ? 0.5 : 1.5), width, 1);
    }
    if (large) strip(pen, first, last, at);
    pen.font = `10.5px ${token("--font")}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const every = STEPS.find((n) => n * x >= 30) ?? 10_000;
    for (let i = first; i < last; i++) {
      const number = grid.number(Math.max(round(i), 0));
      const chosen = context.selected >= number && context.selected < number + lanes;
      if (chosen) frame(pen, at(i) - 1, top - 1, Math.max(x, 3), rows * y, cssColor("--accent"));
      if ((look.step > 1 ? i : number) % every) continue;
      pen.fillStyle = cssColor(chosen ? "--accent" : "--text-3");
      const middle = at(i) + (x - GAP) / 2;
      const half = pen.measureText(number).width / 2;
      if (middle >= half && middle + half <= width) pen.fillText(String(number), middle, 7);
    }
    if (cursor && cursor.column < look.known) {
      const [left, above] = [at(cursor.column) - 1, top + cursor.row * y - 1];
      frame(pen, left, above, Math.max(x, 3), Math.max(y, 3), cssColor("--text"));
    }
  }

  /** One pixel per cell, or per several rounds; then stretched. */
  function pixels(pen, first, last) {
    const { x, y, left, rows, lanes } = look;
    const per = Math.max(1, 1 / x); // columns per pixel
    const wide = Math.max(1, Math.ceil((last - first) / per));
    const tall = Math.max(rows, 1);
    const rgba = new Uint32Array(wide * tall);
    const colors = OUTCOMES.map((outcome) => pixel(rgb(plain(outcome))));
    for (let k = 0; k < rows; k++) {
      const lane = k % lanes;
      const replica = Math.floor(k / lanes);
      for (let p = 0; p < wide; p++) {
        const from = first + Math.floor(p * per);
        const to = Math.max(from + 1, Math.min(first + Math.floor((p + 1) * per), last));
        let worst = 0;
        for (let i = from; i < to; i++) worst = Math.max(worst, grid.code(round(i, lane), replica));
        rgba[p + k * wide] = colors[worst];
      }
    }
    pen.imageSmoothingEnabled = false;
    const shown = x < 1 ? wide * per * x : (last - first) * x;
    pen.drawImage(raster(wide, tall, rgba), first * x - left, top, shown, rows * y);
  }

  function strip(pen, first, last, at) {
    const { x, replicas } = look;
    const count = Math.max(replicas.length, 1);
    const tall = STRIP - 6;
    pen.fillStyle = cssColor("--p-compute");
    const per = Math.max(1, Math.floor(1 / x));
    for (let i = first; i < Math.min(last, look.known); i += per) {
      let least = count;
      for (let k = i; k < i + per; k++) {
        for (let lane = 0; lane < look.lanes; lane++) {
          const place = round(k, lane);
          if (place >= 0 && place < grid.count) least = Math.min(least, grid.given(place));
        }
      }
      const high = Math.min(least / count, 1) * tall;
      pen.fillRect(at(i), HEAD + tall - high, Math.max(x - (x > 3 ? GAP : 0), 1), high);
    }
    const line = HEAD + tall - Math.min(store.run.quorum / count, 1) * tall;
    pen.fillStyle = cssColor("--s-failed");
    for (let i = 0; i < look.width; i += 7) pen.fillRect(i, Math.round(line), 4, 1);
  }

  const ended = () => RUN_ENDED.has(store.run?.state);
  const speak = () => setText(announcement, cursor ? reading() : summary());

  function summary() {
    if (!grid.count) return ended() ? "No rounds" : "No rounds yet";
    const { committed_rounds, total_rounds, quorum } = store.run;
    const total = format.count(total_rounds);
    const rounds = `${format.count(committed_rounds)} of ${total} rounds committed`;
    if (!large) return rounds;
    const count = look.replicas.length;
    const strip = `the strip shows contributions out of ${count}`;
    return `${rounds}; ${strip}, the dashed line the quorum of ${quorum}`;
  }

  /** The cell at the cursor. */
  function reading() {
    const i = Math.max(round(cursor.column, cursor.row % look.lanes), 0);
    const number = grid.number(i);
    const of = `Round ${number}${fragments > 1 ? `, fragment ${(number - 1) % fragments}` : ""}`;
    if (i >= grid.count) return `${of}: ${ended() ? "not reached" : "not yet"}`;
    const place = Math.floor(cursor.row / look.lanes);
    const replica = look.replicas[place];
    const outcome = OUTCOMES[code(cursor.column, cursor.row)];
    const late = grid.late(i, place);
    const why = store.rounds.get(number)?.reasons[replica] || WHY[outcome];
    const by = late ? ` by ${format.duration(late)}` : "";
    const label = outcome === "open" && ended() ? labels.missing : labels[outcome];
    return `${of}, replica ${replica}: ${label}${by}${why ? ` (${why})` : ""}`;
  }

  function place(event) {
    if (!look) return null;
    const column = Math.floor((event.offsetX + look.left) / look.x);
    const row = Math.floor((event.offsetY - top) / look.y);
    return column >= 0 && column < look.known && row >= 0 && row < look.rows
      ? { column, row }
      : null;
  }

  function move(to) {
    if (to?.column === cursor?.column && to?.row === cursor?.row) return;
    cursor = to;
    draw();
  }

  function setZoom(factor) {
    if (!look) return;
    const middle = (look.left + look.width / 2) / look.x;
    zoom = factor === null ? look.width / look.columns : Math.min(look.x * factor, size.cell + GAP);
    url.set({ pitch: Number(zoom.toFixed(3)) }, { push: true });
    follow = false;
    draw();
    requestAnimationFrame(() =>
      requestAnimationFrame(() => (scroller.scrollLeft = middle * look.x - look.width / 2)),
    );
  }

  function open() {
    const i = cursor ? round(cursor.column, cursor.row % look.lanes) : -1;
    if (i >= 0 && i < grid.count) context.select(grid.number(i));
  }
  split?.addEventListener("change", () => {
    url.set({ fragment: split.value });
    cursor = null;
    draw();
  });
  canvas.addEventListener("pointermove", (event) => move(place(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && move(null));
  canvas.addEventListener("click", (event) => {
    move(place(event));
    open();
  });
  canvas.addEventListener("blur", () => move(null));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[
      event.key
    ];
    if (by && look && grid.count) {
      event.preventDefault();
      const from = cursor ?? { column: by[0] > 0 ? -1 : look.known - (by[0] ? 0 : 1), row: 0 };
      move({
        column: clamp(from.column + by[0] * (event.shiftKey ? 10 : 1), 0, look.known - 1),
        row: clamp(from.row + (cursor ? by[1] : 0), 0, look.rows - 1),
      });
      const left = cursor.column * look.x - scroller.clientWidth / 2;
      scroller.scrollTo({ left, behavior: calm.matches ? "auto" : "smooth" });
    } else if (event.key === "Enter") open();
    else if (event.key === "Escape") move(null);
    else if (large && ["+", "-"].includes(event.key)) setZoom(event.key === "+" ? 1.6 : 1 / 1.6);
  });
  scroller.addEventListener("scroll", () => {
    follow = scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 4;
    draw();
  });
  onTheme(draw);
  new ResizeObserver(draw).observe(body);
  grid.listen(draw);
  let written = ""; // what the texts and the line of the quorum depend on
  return (changed) => {
    const known = `${store.replicas.size} ${ended()} ${store.run?.quorum}`;
    if (changed.has("rounds") || changed.has("tab") || known !== written) draw();
    written = known;
  };
}

function zoomButtons(card, act) {
  const button = (text, label, factor) =>
    h(
      "button.btn.btn-s",
      { type: "button", "aria-label": label, onclick: () => act(factor) },
      text,
    );
  const group = h(
    "span.zoomer",
    { role: "group", "aria-label": "Zoom" },
    button("+", "Zoom in", 1.6),
    button("−", "Zoom out", 1 / 1.6),
    button("All rounds", "All rounds", null),
  );
  card.querySelector(".card-head").append(group);
}

/** Make room for the longest number of a replica. */
function fit(names, replicas) {
  names.style.width = `${String(replicas.at(-1) ?? 0).length * 8 + 8}px`;
}

function label(names, replicas, y, top) {
  const every = Math.max(1, Math.ceil(13 / y));
  names.style.height = `${top + replicas.length * y}px`;
  const wanted = `${replicas.length}/${y}/${top}`;
  if (names.dataset.shown === wanted) return;
  names.dataset.shown = wanted;
  names.replaceChildren();
  for (let i = 0; i < replicas.length; i += every) {
    const name = h("span", {}, String(replicas[i]));
    name.style.top = `${top + i * y + (y - GAP) / 2 - 9}px`;
    names.append(name);
  }
}

function frame(pen, x, y, w, h, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 1.5;
  pen.strokeRect(x + 0.25, y + 0.25, w - 0.5, h - 0.5);
}

const COLORS = {
  included: "--p-compute",
  uploaded: "--p-upload",
  late: "--s-warning",
  refused: "--s-failed",
  void: "--line-strong",
  healing: "--s-provisioning",
  missing: "--surface",
  open: "--grid",
};

/** Colour of an outcome where its shape does not fit. */
const plain = (outcome) => cssColor(COLORS[outcome]);

function styles(pen) {
  const surface = cssColor("--surface");
  return {
    surface,
    included: { fill: cssColor("--p-compute") },
    uploaded: { fill: hatch(pen, cssColor("--p-upload")) },
    late: { fill: hatch(pen, cssColor("--s-warning"), surface), stroke: cssColor("--s-warning") },
    refused: { stroke: cssColor("--s-failed"), glyph: "x" },
    void: { fill: cssColor("--line-strong"), glyph: "-", ink: surface },
    healing: { stroke: cssColor("--s-provisioning"), glyph: "+" },
    missing: { stroke: cssColor("--line-strong") },
    open: { fill: cssColor("--grid") },
  };
}

function cell(pen, x, y, w, h, outcome, looks) {
  const look = looks[outcome] ?? looks.missing;
  const side = Math.min(w, h);
  const round = Math.min(3, side / 4);
  pen.beginPath();
  pen.roundRect(x, y, w, h, round);
  if (look.fill) {
    pen.fillStyle = look.fill;
    pen.fill();
  }
  if (look.stroke) {
    pen.beginPath();
    pen.roundRect(x + 0.6, y + 0.6, w - 1.2, h - 1.2, round);
    pen.strokeStyle = look.stroke;
    pen.lineWidth = 1.2;
    pen.stroke();
  }
  if (!look.glyph) return;
  pen.strokeStyle = look.ink ?? look.stroke;
  pen.lineWidth = Math.max(1.2, side / 11);
  pen.beginPath();
  const inset = side * 0.3;
  x += (w - side) / 2;
  y += (h - side) / 2;
  if (look.glyph === "x") {
    pen.moveTo(x + inset, y + inset);
    pen.lineTo(x + side - inset, y + side - inset);
    pen.moveTo(x + side - inset, y + inset);
    pen.lineTo(x + inset, y + side - inset);
  } else {
    pen.moveTo(x + inset, y + side / 2);
    pen.lineTo(x + side - inset, y + side / 2);
  }
  if (look.glyph === "+") {
    pen.moveTo(x + side / 2, y + inset);
    pen.lineTo(x + side / 2, y + side - inset);
  }
  pen.stroke();
}

/** Draw the keys of the legend; return its texts by outcome. */
function legend(body) {
  const keys = $$("[data-outcome]", body);
  const show = () => {
    for (const key of keys) {
      const pen = sizeCanvas($("canvas", key), 12, 12);
      cell(pen, 0, 0, 12, 12, key.dataset.outcome, styles(pen));
    }
  };
  show();
  onTheme(show);
  const texts = keys.map((key) => [key.dataset.outcome, key.textContent]);
  return { ...Object.fromEntries(texts), open: "not yet" };
}
