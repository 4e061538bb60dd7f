// Pure parts of the charts: unpacking the server's answer, live points, smoothing, outliers.

/** Decode a curve: x is sent as first value and integer differences. */
export function unpacked(row) {
  let raw = 0;
  const x = row.x.map((step) => (raw += step) * row.unit);
  return { ...row, x };
}

/** Bias-corrected exponential moving average; gaps stay gaps. */
function smoothed(values, weight) {
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

/** x of live points on the axis of `curve`, in the server's units. */
export function liveX(columns, curve, axis, origin) {
  if (axis === "wall" || axis === "relative") return columns.wall_s.map((w) => w - origin);
  if (axis === "round" && columns.replica !== null) return columns.step.map((s) => s * curve.unit);
  return columns[axis].map((v) => v * curve.unit);
}

/** Insert a point; the newest value at an x wins. False: it lies among thinned
 * points, where only the server knows what it replaces. */
export function add(curve, x, y) {
  const place = search(curve.x, x);
  if (place < curve.x.length && curve.x[place] !== x) return false;
  if (place === curve.x.length) curve.total += 1;
  curve.x[place] = x;
  curve.y[place] = y;
  return true;
}

/** The same for a band: the running mean at an x. */
export function widen(band, x, y) {
  if (y === null) return;
  const place = search(band.x, x);
  if (place < band.x.length && band.x[place] !== x) return;
  const n = (band.n ??= new Map()).get(x) ?? 0;
  const fresh = place === band.x.length || band.mean[place] === null;
  band.n.set(x, n + 1);
  band.x[place] = x;
  band.mean[place] = fresh || !n ? y : band.mean[place] + (y - band.mean[place]) / (n + 1);
  band.low[place] = fresh ? y : Math.min(band.low[place], y);
  band.high[place] = fresh ? y : Math.max(band.high[place], y);
}

/** Make x strictly increasing, as uPlot requires; of equal x the last point stays. */
export function rising({ x, y }) {
  if (x.every((value, i) => !i || value > x[i - 1])) return [x, y];
  const order = x.map((_, i) => i).sort((a, b) => x[a] - x[b] || a - b);
  const kept = order.filter((at, i) => x[order[i + 1]] !== x[at]);
  return [kept.map((at) => x[at]), kept.map((at) => y[at])];
}

/** A line of a chart: the curve in rising order, smoothed unless `look` is raw. */
export function line(id, name, curve, view, look) {
  const [x, y] = rising(curve);
  const smooth = look.raw ? 0 : view.smooth;
  const odd = (curve.odd ?? []).map(([i, kind]) => [curve.x[i], kind]);
  return { id, name, x, y: smoothed(y, smooth), ghost: smooth > 0 ? y : null, odd, width: 1.5, ...look };
}

/** The range of most values with a margin, [low, high], and the number of outliers. */
export function usual(columns) {
  const all = columns.flatMap((c) => c.filter((v) => v !== null && v !== undefined)).sort((a, b) => a - b);
  if (all.length < 20) return null;
  const at = (part) => all[Math.round(part * (all.length - 1))];
  const room = (at(0.95) - at(0.05)) * 0.6 || Math.abs(at(0.5)) * 0.1 || 1;
  const low = Math.max(all[0], at(0.05) - room);
  const high = Math.min(all.at(-1), at(0.95) + room);
  return { low, high, clipped: all.filter((v) => v < low || v > high).length };
}

/** The newest value at or before index `i` of a column with gaps. */
export function lastKnown(column, i) {
  for (let k = Math.min(i, column.length - 1); k >= 0; k--) {
    if (column[k] !== null && column[k] !== undefined) return column[k];
  }
  return null;
}

/** Index of `value`, or its insertion index, in a sorted list; checks the end first. */
export function search(sorted, value) {
  let high = sorted.length;
  if (!high || sorted[high - 1] < value) return high;
  let low = 0;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
