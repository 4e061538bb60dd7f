// Replica x round: who took part in what. Own canvas; arrow keys read it, Enter or a click opens
// the round. Every outcome has a shape as well as a colour.
//
// Only the columns in sight are drawn, so 5,000 rounds scroll like ten. Cells smaller than a few
// pixels are a raster; a pixel that stands for several rounds shows the worst of them.

import { calm, clamp, cssColor, darkScheme, h, oncePerFrame, setText, timed, url } from "../lib/dom.js";
import { hatch, pixel, raster, rgb, sizeCanvas } from "../lib/palette.js";
import { OUTCOMES, RoundGrid } from "./grid.js";

const WORDS = {
  included: "included", uploaded: "uploaded, round open", late: "late", refused: "refused",
  void: "round void", missing: "missing", open: "not yet",
};
const SIZES = { small: { cell: 17, least: 7, tallest: 300 }, large: { cell: 30, least: 9, tallest: 560 } };
const GAP = 2;
const HEAD = 18; // the line of round numbers
const STRIP = 26; // how many contributed, against the quorum
const RASTER = 6; // cells below so many pixels are a raster
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

export function heatmap(context, card) {
  const { store, page } = context;
  const large = card.dataset.heatmap === "large";
  const size = SIZES[card.dataset.heatmap];
  const top = HEAD + (large ? STRIP : 0);
  const body = card.querySelector(".card-body");
  const names = h("div.heat-names", { "aria-hidden": "true" });
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Outcome of each replica in each round. Arrow keys read it, Enter opens a round, plus and minus zoom." });
  const spacer = h("div.heat-space", {}, canvas);
  const scroller = h("div.heat-scroll", {}, spacer);
  const say = h("p.heat-say", { "aria-live": "polite" });
  body.append(h("div.heat", {}, names, scroller), say, legend());
  const grid = (context.grid ??= new RoundGrid(store, page.dataset.heatmapData));
  let look = null; // what is drawn: pitches, columns
  let cursor = null; // {replica, column}
  let follow = true;
  let zoom = large ? Number(url.get("pitch")) || null : null; // pixels per round; null: as fits
  if (large) zoomButtons(card, (factor) => setZoom(factor));

  const draw = oncePerFrame(() => {
    if (!store.run || !card.offsetParent) return;
    const begun = performance.now();
    grid.update();
    const replicas = grid.replicas;
    const width = Math.max(body.clientWidth - 32 - 30, 60);
    const columns = Math.max(grid.count, Math.min(store.run.total_rounds, Math.floor(width / (size.cell + GAP))));
    const fits = clamp(Math.floor(width / columns), size.least + GAP, size.cell + GAP);
    const x = clamp(zoom ?? fits, width / columns, size.cell + GAP);
    const y = Math.max(1, Math.min(zoom ? size.cell + GAP : x, Math.floor((size.tallest - top) / Math.max(replicas.length, 1))));
    look = { replicas, columns, x, y, width: Math.min(width, Math.ceil(columns * x)), raster: Math.min(x, y) < RASTER, height: top + replicas.length * y + 1 };
    spacer.style.width = `${columns * x}px`;
    spacer.style.height = `${look.height}px`;
    if (follow) scroller.scrollLeft = scroller.scrollWidth;
    look.left = scroller.scrollLeft;
    paint();
    label(names, look, top);
    speak();
    timed(`heatmap drawn ${card.dataset.heatmap}`, begun);
  });

  function paint() {
    const { x, y, left, width, height, replicas } = look;
    const pen = sizeCanvas(canvas, width, height);
    const first = Math.floor(left / x);
    const last = Math.min(Math.ceil((left + width) / x), look.columns);
    const at = (i) => i * x - left;
    if (look.raster) pixels(pen, first, last);
    else {
      const looks = styles(pen);
      for (let i = first; i < last; i++) {
        for (let k = 0; k < replicas.length; k++) cell(pen, at(i), top + k * y, x - GAP, y - GAP, OUTCOMES[grid.code(i, k)], looks);
      }
    }
    if (large) strip(pen, first, last, at);
    pen.font = `10.5px ${cssColor("--font")}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const every = STEPS.find((n) => n * x >= 30) ?? 10_000;
    for (let i = first; i < last; i++) {
      const number = grid.number(i);
      if (number === context.selected) frame(pen, at(i) - 1, top - 1, Math.max(x, 3), replicas.length * y, cssColor("--accent"));
      if (number % every && !(number === 1 && every < 5)) continue;
      pen.fillStyle = number === context.selected ? cssColor("--accent") : cssColor("--text-3");
      pen.fillText(String(number), at(i) + (x - GAP) / 2, 7);
    }
    if (cursor && cursor.column < grid.count) frame(pen, at(cursor.column) - 1, top + cursor.replica * y - 1, Math.max(x, 3), Math.max(y, 3), cssColor("--text"));
  }

  /** One pixel per cell, or per several rounds; then stretched. */
  function pixels(pen, first, last) {
    const { x, y, left, replicas } = look;
    const per = Math.max(1, 1 / x); // rounds per pixel
    const wide = Math.max(1, Math.ceil((last - first) / per));
    const tall = Math.max(replicas.length, 1);
    const words = new Uint32Array(wide * tall);
    const colors = OUTCOMES.map((outcome) => pixel(rgb(plain(outcome))));
    for (let p = 0; p < wide; p++) {
      const from = first + Math.floor(p * per);
      const to = Math.max(from + 1, Math.min(first + Math.floor((p + 1) * per), last));
      for (let k = 0; k < replicas.length; k++) {
        let worst = 0;
        for (let i = from; i < to; i++) worst = Math.max(worst, grid.code(i, k));
        words[p + k * wide] = colors[worst];
      }
    }
    pen.imageSmoothingEnabled = false;
    pen.drawImage(raster(wide, tall, words), first * x - left, top, x < 1 ? wide * per * x : (last - first) * x, replicas.length * y);
  }

  function strip(pen, first, last, at) {
    const { x, replicas } = look;
    const count = Math.max(replicas.length, 1);
    const tall = STRIP - 6;
    pen.fillStyle = cssColor("--p-compute");
    const per = Math.max(1, Math.floor(1 / x));
    for (let i = first; i < Math.min(last, grid.count); i += per) {
      let least = Infinity;
      for (let k = i; k < Math.min(i + per, grid.count); k++) least = Math.min(least, grid.given(k));
      const high = Math.min(least / count, 1) * tall;
      pen.fillRect(at(i), HEAD + tall - high, Math.max(x - (x > 3 ? GAP : 0), 1), high);
    }
    const line = HEAD + tall - Math.min(store.run.quorum / count, 1) * tall;
    pen.fillStyle = cssColor("--s-failed");
    for (let i = 0; i < look.width; i += 7) pen.fillRect(i, Math.round(line), 4, 1);
  }

  function speak() {
    if (!cursor) {
      setText(say, grid.count ? `${grid.committed()} of ${store.run.total_rounds} rounds committed${large ? `; the strip shows who gave, of ${look.replicas.length}, the dashed line the quorum of ${store.run.quorum}` : ""}` : "No round yet");
      return;
    }
    if (cursor.column >= grid.count) return setText(say, `round ${grid.number(cursor.column)}: not yet`);
    const number = grid.number(cursor.column);
    const replica = look.replicas[cursor.replica];
    const row = store.rounds.get(number)?.contributions.find((c) => c.replica === replica);
    setText(say, `Round ${number}, replica ${replica}: ${WORDS[OUTCOMES[grid.code(cursor.column, cursor.replica)]]}${row?.reason ? ` (${row.reason})` : ""}`);
  }

  function place(event) {
    if (!look) return null;
    const column = Math.floor((event.offsetX + look.left) / look.x);
    const replica = Math.floor((event.offsetY - top) / look.y);
    return column >= 0 && column < grid.count && replica >= 0 && replica < look.replicas.length ? { column, replica } : null;
  }

  function move(to) {
    if (to?.column === cursor?.column && to?.replica === cursor?.replica) return;
    cursor = to;
    draw();
  }

  function setZoom(factor) {
    if (!look) return;
    const middle = (look.left + look.width / 2) / look.x;
    zoom = factor === null ? look.width / look.columns : Math.min(look.x * factor, size.cell + GAP);
    url.set({ pitch: Number(zoom.toFixed(3)) });
    follow = false;
    draw();
    requestAnimationFrame(() => requestAnimationFrame(() => (scroller.scrollLeft = middle * look.x - look.width / 2)));
  }

  const open = () => cursor && cursor.column < grid.count && context.select(grid.number(cursor.column));
  canvas.addEventListener("pointermove", (event) => move(place(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && move(null));
  canvas.addEventListener("click", (event) => {
    move(place(event));
    open();
  });
  canvas.addEventListener("blur", () => move(null));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (by && look && grid.count) {
      event.preventDefault();
      const from = cursor ?? { column: by[0] > 0 ? -1 : grid.count - (by[0] ? 0 : 1), replica: 0 };
      move({ column: clamp(from.column + by[0] * (event.shiftKey ? 10 : 1), 0, grid.count - 1), replica: clamp(from.replica + (cursor ? by[1] : 0), 0, look.replicas.length - 1) });
      scroller.scrollTo({ left: cursor.column * look.x - scroller.clientWidth / 2, behavior: calm.matches ? "auto" : "smooth" });
    } else if (event.key === "Enter") open();
    else if (event.key === "Escape") move(null);
    else if (large && ["+", "-"].includes(event.key)) setZoom(event.key === "+" ? 1.6 : 1 / 1.6);
  });
  scroller.addEventListener("scroll", () => {
    follow = scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 4;
    draw();
  });
  darkScheme.addEventListener("change", draw);
  new ResizeObserver(draw).observe(body);
  grid.listen(draw);
  return (changed) => {
    if (changed.has("rounds") || changed.has("replicas") || changed.has("tab")) draw();
  };
}

function zoomButtons(card, act) {
  const button = (text, label, factor) => h("button.btn.btn-s", { type: "button", "aria-label": label, onclick: () => act(factor) }, text);
  const group = h("span.zoomer", { role: "group", "aria-label": "Zoom" }, button("+", "Closer", 1.6), button("−", "Farther", 1 / 1.6), button("All rounds", "All rounds", null));
  card.querySelector(".card-head").append(group);
}

function label(names, { replicas, y }, top) {
  const every = Math.max(1, Math.ceil(13 / y));
  names.style.width = `${Math.max(1, String(replicas.at(-1) ?? 0).length) * 8 + 8}px`;
  names.style.height = `${top + replicas.length * y}px`;
  const wanted = `${replicas.length}/${y}/${top}`;
  if (names.dataset.shown === wanted) return;
  names.dataset.shown = wanted;
  names.replaceChildren(...replicas.map((number, i) => [number, i]).filter(([, i]) => i % every === 0).map(([number, i]) => {
    const name = h("span", {}, String(number));
    name.style.top = `${top + i * y + (y - GAP) / 2 - 9}px`;
    return name;
  }));
}

function frame(pen, x, y, w, h, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 1.5;
  pen.strokeRect(x + 0.25, y + 0.25, w - 0.5, h - 0.5);
}

/** One colour of an outcome, where there is no room for its shape. */
function plain(outcome) {
  return cssColor({ included: "--p-compute", uploaded: "--p-upload", late: "--s-warning", refused: "--s-failed", void: "--line-strong", missing: "--surface", open: "--grid" }[outcome]);
}

function styles(pen) {
  const surface = cssColor("--surface");
  return {
    surface,
    included: { fill: cssColor("--p-compute") },
    uploaded: { fill: hatch(pen, cssColor("--p-upload")) },
    late: { fill: hatch(pen, cssColor("--s-warning"), surface), stroke: cssColor("--s-warning") },
    refused: { stroke: cssColor("--s-failed"), glyph: "x" },
    void: { fill: cssColor("--line-strong"), glyph: "-", ink: surface },
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
  pen.stroke();
}

function legend() {
  const list = h("p.heat-legend");
  const show = () => list.replaceChildren(...["included", "uploaded", "late", "refused", "void", "missing"].map((outcome) => {
    const key = h("canvas.key");
    const pen = sizeCanvas(key, 12, 12);
    cell(pen, 0, 0, 12, 12, outcome, styles(pen));
    return h("span", {}, key, WORDS[outcome]);
  }));
  show();
  darkScheme.addEventListener("change", show);
  return list;
}
