// Marks that a chart draws over its plot: newest values, and values that are not finite.

import { clamp, cssColor, token } from "../lib/dom.js";
import { lastKnown } from "./curves.js";

export const ODD = { nan: "NaN", inf: "∞", "-inf": "−∞" };

/** Write the newest value of each line at its end, where there is room. `lines` are pairs of a line
 * and the place of its column; `text` formats a value. */
export function markNewest(u, lines, text) {
  const pen = u.ctx;
  pen.save();
  pen.font = `500 ${11 * devicePixelRatio}px ${token("--font")}`;
  pen.textAlign = "right";
  pen.textBaseline = "bottom";
  const tall = 14 * devicePixelRatio;
  const used = [];
  for (const [one, first] of lines.reverse().slice(0, 4)) {
    const column = u.data[first];
    const value = lastKnown(column, column.length - 1);
    if (value === null || !(value >= u.scales.y.min && value <= u.scales.y.max)) continue;
    const y = Math.max(u.valToPos(value, "y", true) - 3 * devicePixelRatio, u.bbox.top + tall);
    if (used.some((other) => Math.abs(other - y) < tall)) continue;
    used.push(y);
    const x = u.bbox.left + u.bbox.width - 4 * devicePixelRatio;
    pen.lineWidth = 3 * devicePixelRatio;
    pen.strokeStyle = cssColor("--surface");
    pen.strokeText(text(value), x, y);
    pen.fillStyle = one.color;
    pen.fillText(text(value), x, y);
  }
  pen.restore();
}

/** Mark values that are not finite at the upper edge, as they have no place on the y axis: a
 * stretch of them once. `values` are pairs of x and the kind of value. */
export function markNotFinite(u, values) {
  const pen = u.ctx;
  pen.save();
  pen.fillStyle = cssColor("--s-failed");
  pen.textAlign = "center";
  pen.font = `${10 * devicePixelRatio}px ${token("--font")}`;
  const size = 5 * devicePixelRatio;
  const { left, top, width } = u.bbox;
  const places = values
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
