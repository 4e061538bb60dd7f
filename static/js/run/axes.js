// The axes of a chart: names, texts of values, and the visible ranges.

import * as format from "../lib/format.js";

export const AXES = {
  step: "inner step",
  round: "round",
  tokens: "tokens of all replicas",
  wall: "time",
  relative: "time since the first step",
  money: "US dollars",
};

/** A value of a horizontal axis as text. */
export function axisText(axis, x) {
  if (axis === "wall") return format.clock(x * 1000, { seconds: true });
  if (axis === "relative") return format.duration(x);
  if (axis === "money") return format.money(x);
  if (axis === "round") return String(Math.round(x * 100) / 100);
  return format.count(x);
}

/** The part of a line where x > 0, which a logarithmic axis can show. */
export function positivePart(x, y) {
  const from = x.findIndex((v) => v > 0);
  return from > 0 ? [x.slice(from), y.slice(from)] : from < 0 ? [[], []] : [x, y];
}

/** The selected range of the x axis, or all of it. */
export function visibleRange({ from, to }, low, high) {
  if (from !== null && to !== null) return [from, to];
  return low === high ? [low - 0.5, high + 0.5] : [from ?? low, to ?? high];
}

/** The range of the y axis with some room at both ends. */
export function padded(low, high, log) {
  if (log) return [low / 1.15, high * 1.15];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}
