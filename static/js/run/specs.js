// What each chart shows: which series, as which lines, in which colours.
//
// A line: id (in the address), name, x, y, and how it looks. Ghosts are the raw values behind a
// smoothed line (only the losses of single steps are smoothed: a round's values are means already);
// a band is two hidden lines with the space between them filled.

import * as format from "../lib/format.js";
import { cssColor } from "../lib/dom.js";
import { evalSwatch, groupFill, key, replicaDash, replicaHue, replicaSwatch } from "../lib/palette.js";
import { rising, smoothed } from "./curves.js";

const DENSE = 60; // points of a line; fewer are marked
export const GROUPS = ["compute", "upload", "wait", "apply", "other"];

const find = (data, series) => data.curves.find((c) => c.series === series && c.replica === null);

const band = (low, high, name) => ({
  id: "band", name, band: [low, high], fill: `${cssColor("--text-3")}2b`, odd: [],
  swatch: () => key(() => `${cssColor("--text-3")}55`),
});

function line(id, name, curve, view, look) {
  const [x, y] = rising(curve);
  const raw = look.raw ? null : y;
  return { id, name, x, y: raw ? smoothed(y, view.smooth) : y, ghost: raw && view.smooth > 0 ? y : null, odd: (curve.odd ?? []).map(([i, kind]) => [curve.x[i], kind]), ...look };
}

const one = (id, name, series, color) => (data, view) => {
  const curve = find(data, series);
  return curve ? [line(id, name, curve, view, { raw: true, color: cssColor(color), width: 1.5, points: curve.x.length <= DENSE, swatch: () => key(() => cssColor(color)) })] : [];
};

/** Replicas' curves of one series, one by one or as a band; `raw`: not smoothed. */
const replicas = (series, { raw = true } = {}) => (data, view) => {
  const found = [];
  if (data.band?.x.length) {
    const { x, low, high } = data.band;
    found.push(band([x, low], [x, high], "Lowest to highest"));
    found.push(line("mean", "Mean", { x: data.band.x, y: data.band.mean }, view, { raw, color: cssColor("--text-3"), width: 2, swatch: () => key(() => cssColor("--text-3")) }));
  }
  for (const curve of data.curves.filter((c) => c.series === series)) {
    found.push(line(`r${curve.replica}`, `Replica ${curve.replica}`, curve, view, {
      raw, points: raw && curve.x.length <= DENSE, color: cssColor(replicaHue(curve.replica)), dash: replicaDash(curve.replica), width: 1.5, swatch: () => replicaSwatch(curve.replica),
    }));
  }
  return found;
};

function loss(data, view) {
  const found = replicas("loss", { raw: false })(data, view);
  const evaluation = find(data, "eval_loss");
  // Points while they can be told apart; then the line alone.
  if (evaluation) found.push(line("eval", "Evaluation", evaluation, view, { raw: true, color: cssColor("--text"), width: 2, points: evaluation.x.length <= DENSE, swatch: evalSwatch }));
  return found;
}

/** Mean, lowest and highest of what the replicas gave to a round. */
const given = (name) => ({ of: [name, `${name}_low`, `${name}_high`], lines: spread(name), text: format.short, empty: ROUND });

const spread = (name) => (data, view) => {
  const [low, high, mean] = [`${name}_low`, `${name}_high`, name].map((series) => find(data, series));
  if (!mean) return [];
  const found = [];
  if (low && high) found.push(band(rising(low), rising(high), "Replicas"));
  found.push(line(name, "Mean", mean, view, { raw: true, points: mean.x.length <= DENSE, color: cssColor("--p-compute"), width: 1.5, swatch: () => key(() => cssColor("--p-compute")) }));
  return found;
};

/** Shares of the replicas' time, on top of each other. */
function goodput(data) {
  const curves = GROUPS.map((name) => [name, find(data, `phase_${name}`)]).filter(([, c]) => c);
  if (!curves.length) return [];
  const x = curves[0][1].x;
  const same = curves.filter(([, c]) => c.x.length === x.length);
  const total = x.map((_, i) => same.reduce((all, [, c]) => all + (c.y[i] ?? 0), 0));
  const sum = x.map(() => 0);
  return same.map(([name, c]) => {
    const y = x.map((_, i) => (total[i] ? (sum[i] += (c.y[i] ?? 0) / total[i]) : null));
    const share = x.map((_, i) => (total[i] ? (c.y[i] ?? 0) / total[i] : null));
    return { id: name, name, x, y, share, odd: [], stack: true, color: "transparent", width: 0, fill: (u) => groupFill(u.ctx, name), swatch: () => key((pen) => groupFill(pen, name)) };
  }).reverse();
}

const size = (text = format.size) => ({ text, axis: format.size });
const rate = (value) => `${format.size(value)}/s`;
/** A replica's own figure by segment or by round; `empty` says why there may be none. */
const own = (series, empty, look) => ({ of: [series], lines: replicas(series), text: format.short, empty, ...look });
const STEP = "The first point comes with the first step";
const ROUND = "The first point comes with the first committed round";
const GPU = "No replica has told of a GPU";

export const SPECS = {
  gpu: own("gpu_busy", GPU, { text: format.percent, plain: true }),
  gpu_memory: own("gpu_memory_bytes", GPU, size()),
  memory: own("rss_bytes", STEP, size()),
  cpu: own("cpu_cores", STEP),
  up: own("up_bytes_per_s", ROUND, size(rate)),
  down: own("down_bytes_per_s", ROUND, size(rate)),
  bytes_up: own("bytes_up", ROUND, size()),
  bytes_down: own("bytes_down", ROUND, size()),
  grad: own("grad_norm", STEP),
  step_s: own("step_s", STEP, { text: format.duration, axis: format.duration }),
  loss: { of: ["loss", "eval_loss"], lines: loss, text: format.loss, empty: "The curve begins with the first step" },
  norm: given("norm"),
  cosine: given("cosine"),
  update: { of: ["update_norm"], lines: one("update", "Outer update", "update_norm", "--p-apply"), text: format.short, empty: ROUND },
  speed: { of: ["tokens_per_s"], lines: one("speed", "Tokens/s", "tokens_per_s", "--p-reduce"), text: format.count, empty: ROUND },
  goodput: { of: GROUPS.map((name) => `phase_${name}`), lines: goodput, text: format.percent, last: true, plain: true, empty: ROUND },
};
