// The strip of rounds along the bottom of a board: for each pixel the shares of replicas that were
// included, late, refused or missing. Its x axis is that of the charts above it.

import * as format from "../lib/format.js";
import { clamp, cssColor, h, isShown, onTheme, setText, timed } from "../lib/dom.js";
import { oncePerFrame } from "../lib/frames.js";
import { sizeCanvas } from "../lib/palette.js";
import { OUTCOMES } from "./grid.js";

const HEIGHT = 24;
const ORDER = ["included", "uploaded", "healing", "late", "void", "refused", "missing"];
const COLORS = {
  included: "--p-compute", uploaded: "--p-upload", healing: "--s-provisioning", late: "--s-warning",
  void: "--line-strong", refused: "--s-failed", missing: "--sunken",
};

/** `range()` is the plot of a chart above: {left, width, min, max} in pixels and axis values. */
export function roundStrip(context, place, { axis, range, origin }) {
  const { store, syncEvery } = context;
  const canvas = h("canvas", {
    role: "img",
    "aria-label": "Outcomes of the rounds, in step with the charts above",
  });
  const note = h("output");
  place.append(canvas, note);
  let columns = null; // what is drawn: rounds by pixel

  /** Where round i ends on the x axis; null if unknown. */
  function end(i) {
    const { grid } = context;
    const name = axis();
    const number = grid.number(i);
    if (name === "round") return number;
    if (name === "step") return number * syncEvery;
    if (name === "tokens") return grid.tokens(i);
    const at = grid.at(i);
    return at === null ? null : at - origin();
  }

  const draw = oncePerFrame(() => {
    const plot = range();
    const { grid } = context;
    grid?.update(); // the map, which draws the same rounds, can be drawn after this
    place.hidden = !plot || !grid?.count;
    if (!isShown(place)) return;
    const begun = performance.now();
    const pen = sizeCanvas(canvas, place.clientWidth, HEIGHT);
    const count = grid.replicas.length;
    const colors = Object.fromEntries(ORDER.map((outcome) => [outcome, cssColor(COLORS[outcome])]));
    const scale = plot.width / (plot.max - plot.min || 1);
    columns = new Map(); // pixel -> [first, last] round of it
    let before = null;
    for (let i = 0; i < grid.count; i++) {
      const to = end(i);
      if (to === null) continue;
      const from =
        before ?? (axis() === "round" ? to - 1 : axis() === "step" ? to - syncEvery : to);
      before = to;
      if (to < plot.min || from > plot.max) continue;
      const first = Math.max(Math.floor((from - plot.min) * scale), 0);
      const last = Math.min(
        Math.max(Math.ceil((to - plot.min) * scale), first + 1),
        Math.ceil(plot.width),
      );
      for (let x = first; x < last; x++) {
        const known = columns.get(x);
        if (known) known[1] = i;
        else columns.set(x, [i, i]);
      }
    }
    const shares = new Map(); // "first-last" -> heights, because neighbours show the same rounds
    for (const [x, [first, last]] of columns) {
      const key = first * 1e6 + last;
      let heights = shares.get(key);
      if (!heights) shares.set(key, heights = sum(first, last, count));
      let y = HEIGHT;
      for (const [outcome, part] of heights) {
        const tall = part * HEIGHT;
        pen.fillStyle = colors[outcome];
        pen.fillRect(plot.left + x, y - tall, 1, tall);
        y -= tall;
      }
    }
    timed("round strip drawn", begun);
  });

  /** Shares of the outcomes in some rounds, at most 32 of which are read. */
  function sum(first, last, count) {
    const counts = new Array(OUTCOMES.length).fill(0);
    const every = Math.max(1, Math.floor((last - first + 1) / 32));
    for (let i = first; i <= last; i += every)
      for (let k = 0; k < count; k++) counts[context.grid.code(i, k)] += 1;
    const total = counts.reduce((all, one) => all + one, 0) - counts[OUTCOMES.indexOf("open")];
    if (!total) return [];
    return ORDER.map((outcome) => [outcome, counts[OUTCOMES.indexOf(outcome)] / total]).filter(
      ([, part]) => part,
    );
  }

  function at(event) {
    const plot = range();
    return plot && columns?.get(Math.floor(clamp(event.offsetX - plot.left, 0, plot.width)));
  }
  canvas.addEventListener("pointermove", (event) => {
    const rounds = at(event);
    if (!rounds) return setText(note, "");
    const [first, last] = rounds.map((i) => context.grid.number(i));
    const parts = sum(...rounds, context.grid.replicas.length).map(
      ([outcome, part]) => `${format.percent(part)} ${outcome}`,
    );
    setText(
      note,
      `Round${first === last ? ` ${first}` : `s ${first} to ${last}`}: ${parts.join(", ")}`,
    );
  });
  canvas.addEventListener("pointerleave", () => setText(note, ""));
  canvas.addEventListener("click", (event) => {
    const rounds = at(event);
    if (rounds) context.select(context.grid.number(rounds[1]));
  });
  onTheme(draw);
  new ResizeObserver(draw).observe(place);
  return { draw };
}
