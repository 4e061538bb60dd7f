// A replica has the same hue and dash pattern in every chart, and a run wherever it is compared.
// Phases and states have a colour and, where colour alone would carry meaning, a pattern.

import { cssColor, h, svg } from "./dom.js";

const HUES = 8;
const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3]];

export const replicaHue = (number) => `--r-${number % HUES}`;
export const replicaDash = (number) => DASHES[Math.floor(number / HUES) % DASHES.length];

/** The number of each compared run for the functions of replicas: the hue that its id gives. Of
 *  runs with the same hue all but one get a free one; with more runs than hues another dash
 *  pattern. The order does not matter. */
export function runNumbers(ids) {
  const hueOf = (id) => parseInt(id.slice(0, 8), 16) % HUES || 0;
  const hues = new Map([...ids].sort().map((id) => [id, hueOf(id)]));
  const owners = new Map(); // number -> id
  for (const [id, hue] of hues) if (!owners.has(hue)) owners.set(hue, id);
  for (const [id, hue] of hues) {
    if (owners.get(hue) === id) continue;
    let number = hue;
    for (let more = 1; owners.has(number); more++)
      number = HUES * Math.floor(more / HUES) + ((hue + more) % HUES);
    owners.set(number, id);
  }
  return new Map([...owners].map(([number, id]) => [id, number]));
}

/** A line sample for legends and tables. It follows the theme. */
export function swatch(hue, dash, width, ...more) {
  const line = svg("path", {
    d: "M1 5H21",
    "stroke-width": width,
    "stroke-dasharray": dash.join(" ") || "none",
  });
  line.style.stroke = `var(${hue})`;
  return svg(
    "svg",
    { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" },
    line,
    ...more,
  );
}

export const replicaSwatch = (number) => swatch(replicaHue(number), replicaDash(number), 2.5);

/** The mark of the evaluation curve: a line with a point. */
export function evalSwatch() {
  const point = svg("circle", { cx: 11, cy: 5, r: 3.4 });
  point.style.fill = "var(--text)";
  return swatch("--text", [], 2, point);
}

export const PHASES = [
  "bootstrap",
  "start",
  "compute",
  "encode",
  "upload",
  "wait",
  "download",
  "reduce",
  "apply",
  "other",
];

/** Fill style of a phase on `context`. Waiting is hatched, so that it is visible without colour. */
export function phaseFill(context, phase) {
  const color = phase === "other" ? cssColor("--line-strong") : cssColor(`--p-${phase}`);
  return phase === "wait" ? hatch(context, color) : color;
}

/** Phase groups of charts and timeline: exchange is upload and apply. */
export const groupColor = (group) =>
  cssColor({ down: "--p-download", other: "--p-encode" }[group] ?? `--p-${group}`);

export function groupFill(context, group) {
  const color = groupColor(group);
  return group === "wait" ? hatch(context, color, cssColor("--surface")) : color;
}

/** [r, g, b] of "#rrggbb". */
export const rgb = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

export function hatch(context, color, ground = null) {
  const tile = h("canvas");
  const scale = Math.max(1, Math.round(devicePixelRatio || 1));
  const side = 6 * scale;
  tile.width = tile.height = side;
  const pen = tile.getContext("2d");
  pen.fillStyle = ground ?? color;
  pen.globalAlpha = ground ? 1 : 0.3;
  pen.fillRect(0, 0, side, side);
  pen.globalAlpha = 1;
  pen.strokeStyle = color;
  pen.lineWidth = 1.8 * scale;
  for (const shift of [-side, 0, side]) {
    pen.beginPath();
    pen.moveTo(shift - 1, side + 1);
    pen.lineTo(shift + side + 1, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}

/** Size a canvas for the screen's pixels; the context then takes CSS pixels. */
export function sizeCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** An image with one pixel per colour (see `pixel`), row by row. */
export function raster(width, height, colors) {
  const canvas = h("canvas", { width, height });
  const image = new ImageData(width, height);
  new Uint32Array(image.data.buffer).set(colors);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

export const pixel = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

/** A rectangle filled with `fill(context)`, for legends. */
export function key(fill, width = 14, y = 0, height = 12) {
  const canvas = h("canvas.key");
  const pen = sizeCanvas(canvas, width, 12);
  pen.fillStyle = fill(pen);
  pen.fillRect(0, y, width, height);
  return canvas;
}
