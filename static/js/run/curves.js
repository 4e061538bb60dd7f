// From the store's columns to what the loss chart draws: another x axis, smoothing, one table.

/** Bias-corrected exponential moving average; gaps stay gaps. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let seen = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    seen += 1;
    mean = mean * weight + value * (1 - weight);
    return mean / (1 - weight ** seen);
  });
}

/** x of every point of `columns`. Training points of a replica and evaluations of the run's global
 * weights meet on each axis: tokens are those of all replicas, rounds of training are fractional. */
export function xValues(columns, axis, { syncEvery, replicas, begun }) {
  const own = columns.replica !== null;
  if (axis === "round") return own ? columns.step.map((s) => s / syncEvery) : columns.round;
  if (axis === "tokens") return own ? columns.tokens.map((t) => t * replicas) : columns.tokens;
  if (axis === "wall") return columns.wall_s.map((w) => w - begun);
  return columns.step;
}

/** Strictly rising x with its y, as the chart needs it; of points at one place the last stays. */
export function rising(x, y) {
  let sorted = true;
  for (let i = 1; i < x.length && sorted; i++) sorted = x[i] > x[i - 1];
  if (sorted) return [x, y];
  const order = x.map((_, i) => i).sort((a, b) => x[a] - x[b] || a - b);
  const xs = [];
  const ys = [];
  for (const i of order) {
    if (xs.length && xs.at(-1) === x[i]) ys[ys.length - 1] = y[i];
    else {
      xs.push(x[i]);
      ys.push(y[i]);
    }
  }
  return [xs, ys];
}

/** The newest value at or before place `i` of a column with gaps. */
export function lastKnown(column, i) {
  for (let k = Math.min(i, column.length - 1); k >= 0; k--) {
    if (column[k] !== null && column[k] !== undefined) return column[k];
  }
  return null;
}
