// A replica keeps one hue and one dash pattern on every chart, by its number. Phases and states
// have a colour and, where colour would stand alone, a pattern.

import { cssColor } from "./dom.js";

const HUES = 8;
const DASHES = [[], [7, 3], [2, 2.5], [9, 3, 2, 3]];

export const replicaHue = (number) => `--r-${number % HUES}`;
export const replicaDash = (number) => DASHES[Math.floor(number / HUES) % DASHES.length];

const SVG = "http://www.w3.org/2000/svg";

/** A short piece of the replica's line, for legends and tables. Follows the theme by itself. */
export function replicaSwatch(number) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 22 10");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", "M1 5H21");
  line.setAttribute("stroke-width", "2.5");
  line.setAttribute("stroke-dasharray", replicaDash(number).join(" ") || "none");
  line.style.stroke = `var(${replicaHue(number)})`;
  svg.append(line);
  return svg;
}

/** The mark of the evaluation curve: a line with a point. */
export function evalSwatch() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 22 10");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", "M1 5H21");
  line.setAttribute("stroke-width", "2");
  line.style.stroke = "var(--text)";
  const point = document.createElementNS(SVG, "circle");
  point.setAttribute("cx", "11");
  point.setAttribute("cy", "5");
  point.setAttribute("r", "3.4");
  point.style.fill = "var(--text)";
  svg.append(line, point);
  return svg;
}

export const PHASES = ["bootstrap", "start", "compute", "encode", "upload", "wait", "download", "reduce", "apply", "other"];

/** Fill style of a phase on `context`. Waiting is hatched, so that it is seen without colour. */
export function phaseFill(context, phase) {
  const color = phase === "other" ? cssColor("--line-strong") : cssColor(`--p-${phase}`);
  return phase === "wait" ? hatch(context, color) : color;
}

/** Phases as charts and timeline group them: exchanging is upload and apply. */
export const groupColor = (group) => cssColor({ down: "--p-download", other: "--p-encode" }[group] ?? `--p-${group}`);

export const groupFill = (context, group) => (group === "wait" ? hatch(context, groupColor(group), cssColor("--surface")) : groupColor(group));

/** [r, g, b] of "#rrggbb". */
export const rgb = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

export function hatch(context, color, ground = null) {
  const tile = document.createElement("canvas");
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
