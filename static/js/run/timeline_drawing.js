// The drawing of the timeline: time axis, bars or raster, commits, legend.

import * as format from "../lib/format.js";
import { cssColor, h, token } from "../lib/dom.js";
import { groupColor, groupFill, key, pixel, raster, rgb } from "../lib/palette.js";

export const LEFT = 44;
export const TOP = 22;
/** A cell without data. */
export const BLANK = 255;
/** Steps of the time axis in seconds. */
const STEPS = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800,
  86_400, 172_800, 604_800,
];

/** The raster as a canvas of one pixel per cell. */
export function picture({ columns, replicas, groups }, cells) {
  const compute = rgb(groupColor("compute"));
  const colors = new Uint32Array(256);
  groups.forEach((group, kind) => {
    const other = rgb(groupColor(group));
    for (let share = 0; share < 16; share++) {
      const mixed = compute.map((c, i) => Math.round(c + ((other[i] - c) * share) / 15));
      colors[kind * 16 + share] = pixel(mixed);
    }
  });
  colors[BLANK] = 0;
  return raster(columns, Math.max(replicas, 1), Uint32Array.from(cells, (cell) => colors[cell]));
}

/** When a bar ends, in ms of the answer. */
export const ended = ({ started, phases }, i) =>
  phases[i].reduce((sum, ms) => sum + ms, started[i]);

/** Row numbers and time axis. */
export function frame(pen, { from, to, width, row }, data) {
  pen.font = `11px ${token("--font")}`;
  pen.textBaseline = "middle";
  pen.fillStyle = cssColor("--text-3");
  const every = Math.ceil(14 / row);
  pen.textAlign = "right";
  for (let r = 0; r < data.replicas; r += every)
    pen.fillText(String(r), LEFT - 8, TOP + r * row + row / 2);
  const longest = STEPS.at(-1);
  const step = STEPS.find((s) => (s / (to - from)) * width >= 96) ??
    longest * Math.ceil((to - from) / longest / 8);
  pen.textAlign = "center";
  const ticks = [];
  const zone_s = new Date(from * 1000).getTimezoneOffset() * 60; // ticks at full hours of the clock
  for (let t = Math.ceil((from - zone_s) / step) * step + zone_s; t < to; t += step) ticks.push(t);
  const texts = format.timeTicks(ticks);
  ticks.forEach((t, i) => {
    const x = LEFT + ((t - from) / (to - from)) * width;
    pen.fillStyle = cssColor("--grid");
    pen.fillRect(Math.round(x), TOP - 5, 1, data.replicas * row + 5);
    pen.fillStyle = cssColor("--text-3");
    const half = pen.measureText(texts[i]).width / 2;
    if (x - half > LEFT && x + half < LEFT + width) pen.fillText(texts[i], x, 8);
  });
}

export function bars(pen, { x, row }, data) {
  const { replica, started, phases } = data.bars;
  const gap = row > 8 ? 2 : 0;
  const wide = data.groups.map((group) => groupFill(pen, group));
  const thin = data.groups.map(groupColor);
  const down = data.groups.length - 1;
  const order = started
    .map((_, i) => i)
    .sort((a, b) => replica[a] - replica[b] || started[a] - started[b]);
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

export function commits(pen, { x, row, width, from, to }, data) {
  if (data.commits.length > width / 10) return;
  for (const [number, at, state] of data.commits) {
    const when = data.from + at;
    if (when < from || when > to) continue;
    const here = Math.round(x(when));
    const dashed = state === "void";
    const height = data.replicas * row;
    pen.fillStyle = cssColor(dashed ? "--s-failed" : "--text");
    pen.globalAlpha = data.commits.length > width / 42 ? 0.35 : 0.75;
    if (!dashed) pen.fillRect(here, TOP, 1, height);
    else for (let y = 0; y < height; y += 6) pen.fillRect(here, TOP + y, 1, 3);
    pen.globalAlpha = 1;
    if (data.commits.length < width / 42) {
      pen.textAlign = "left";
      pen.font = `10px ${token("--font")}`;
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

export function legend() {
  const filled = (group) => (pen) => groupFill(pen, group);
  const groups = ["compute", "upload", "wait", "apply", "other"];
  return h("p.heat-legend", {},
    groups.map((group) => h("span", {}, key(filled(group)), group)),
    h("span", {}, key(filled("down"), 14, 5, 2), "down, or between rounds"),
    h("span", {}, "| round committed"));
}
