// Chart definitions: series, lines and colours.
//
// A line has an id (used in the address), a name, x, y and a style. Ghosts are the raw values
// behind a smoothed line (only per-step losses are smoothed; values per round are already means). A
// band is two hidden lines with a filled area between them.

import * as format from "../lib/format.js";
import { cssColor } from "../lib/dom.js";
import {
  evalSwatch,
  groupFill,
  key,
  replicaDash,
  replicaHue,
  replicaSwatch,
} from "../lib/palette.js";
import { line, rising, smoothed, spread } from "./curves.js";

const DENSE = 60; // lines with fewer points show markers
export const GROUPS = ["compute", "upload", "wait", "apply", "other"];

const find = (data, series) => data.curves.find((c) => c.series === series && c.replica === null);

const band = (low, high, name) => ({
  id: "band", name, band: [low, high], fill: `${cssColor("--text-3")}2b`, odd: [], nan: [],
  swatch: () => key(() => `${cssColor("--text-3")}55`),
});

/** The look of a line in one colour of the page. */
const plain = (color) => ({ color: cssColor(color), swatch: () => key(() => cssColor(color)) });

/** The look of a line whose points are shown while they are distinguishable. */
const dotted = (curve) => ({ raw: true, points: curve.x.length <= DENSE });

const one = (id, name, series, color) => (data, view) => {
  const curve = find(data, series);
  return curve ? [line(id, name, curve, view, { ...dotted(curve), ...plain(color) })] : [];
};

/** Curves of all replicas for one series, as lines or as a band; `raw`: not smoothed. */
const replicas =
  (series, { raw = true } = {}) =>
  (data, view) => {
    const lines = [];
    if (data.band?.x.length) {
      const { x, low, mean, high } = spread(data.band);
      // Smoothed like the mean, and with its gaps: otherwise the mean could leave the band.
      const end = (y) => [
        x,
        smoothed(
          y.map((v, i) => (mean[i] === null ? null : v)),
          raw ? 0 : view.smooth,
        ),
      ];
      const nan = x.filter((_, i) => mean[i] === null).map((at) => [at, "nan"]);
      lines.push({ ...band(end(low), end(high), "Minimum to maximum"), nan });
      lines.push(
        line("mean", "Mean", { x, y: mean }, view, { ...plain("--accent"), raw, width: 2, nan }),
      );
    }
    for (const curve of data.curves.filter((c) => c.series === series)) {
      const number = curve.replica;
      lines.push(
        line(`r${number}`, `Replica ${number}`, curve, view, {
          raw,
          replica: number,
          points: raw && curve.x.length <= DENSE,
          color: cssColor(replicaHue(number)),
          dash: replicaDash(number),
          swatch: () => replicaSwatch(number),
        }),
      );
    }
    return lines;
  };

function loss(data, view) {
  const lines = replicas("loss", { raw: false })(data, view);
  const evaluation = find(data, "eval_loss");
  if (evaluation) {
    const look = { ...dotted(evaluation), color: cssColor("--text"), width: 2, swatch: evalSwatch };
    lines.push(line("eval", "Evaluation", evaluation, view, look));
  }
  return lines;
}

/** Mean, minimum and maximum over the contributions of a round. */
const given = (name) => figure([name, `${name}_low`, `${name}_high`], bounds(name));

const bounds = (name) => (data, view) => {
  const [low, high, mean] = [`${name}_low`, `${name}_high`, name].map((series) =>
    find(data, series),
  );
  if (!mean) return [];
  const lines = [];
  if (low && high) lines.push(band(rising(low), rising(high), "Replicas"));
  lines.push(line(name, "Mean", mean, view, { ...dotted(mean), ...plain("--p-compute") }));
  return lines;
};

/** Stacked shares of replica time. */
function goodput(data) {
  const curves = GROUPS.map((name) => [name, find(data, `phase_${name}`)]).filter(([, c]) => c);
  if (!curves.length) return [];
  const x = curves[0][1].x;
  const same = curves.filter(([, c]) => c.x.length === x.length);
  const total = x.map((_, i) => same.reduce((all, [, c]) => all + (c.y[i] ?? 0), 0));
  const sum = x.map(() => 0);
  return same.map(([name, c]) => {
    const share = x.map((_, i) => (total[i] ? (c.y[i] ?? 0) / total[i] : null));
    return {
      id: name,
      name,
      x,
      y: share.map((part, i) => (part === null ? null : (sum[i] += part))),
      share,
      odd: [],
      nan: [],
      color: "transparent",
      width: 0,
      fill: (u) => groupFill(u.ctx, name),
      swatch: () => key((pen) => groupFill(pen, name)),
    };
  }).reverse();
}

/** Why a chart has no lines: `waiting` until `begun` is true of the run. */
const STEP = { waiting: "Data appears after the first step", begun: (run) => run.tokens > 0 };
const ROUND = {
  waiting: "Data appears after the first committed round",
  begun: (run) => run.committed_rounds > 0,
};
const GPU = { waiting: "No replica has reported a GPU", begun: () => false };
const METRIC = { waiting: "No data of this metric", begun: () => false };
const size = (text = format.size) => ({ text, axis: format.size });
const rate = (value) => `${format.size(value)}/s`;
/** A chart of the series `of`; `empty` is shown when there is no data. */
const figure = (of, lines, look) => ({ of, lines, text: format.short, empty: ROUND, ...look });
/** A figure per replica, by segment or by round. */
const own = (series, empty, look) => figure([series], replicas(series), { empty, ...look });

/** The chart of any series: of the replicas, or of the run. */
export const specOf = (id) => SPECS[id] ?? metric(id.replace(/^m:/, ""));

const metric = (series) => figure([series], (data, view) => {
  const curve = find(data, series);
  if (curve) return [line(series, series, curve, view, { ...dotted(curve), ...plain("--accent") })];
  return replicas(series)(data, view);
}, { empty: METRIC });

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
  loss: figure(["loss", "eval_loss"], loss, { text: format.loss, empty: STEP }),
  norm: given("norm"),
  cosine: given("cosine"),
  update: figure(["update_norm"], one("update", "Outer update", "update_norm", "--p-apply")),
  speed: figure(["tokens_per_s"], one("speed", "Tokens/s", "tokens_per_s", "--p-reduce"), {
    text: format.count,
  }),
  goodput: figure(
    GROUPS.map((name) => `phase_${name}`),
    goodput,
    { text: format.percent, last: true, plain: true },
  ),
};
