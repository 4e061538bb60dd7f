// Pure parts of the charts: unpacking the server's answer, live points, smoothing, outliers.

/** Decode a curve: x is sent as first value and integer differences. */
export function unpacked(row) {
  let raw = 0;
  const x = row.x.map((step) => (raw += step) * row.unit);
  return { ...row, x };
}

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

/** Keep a live point of a replica for `spread`. */
export function widen(band, replica, x, y) {
  if (x > (band.x.at(-1) ?? -Infinity)) (band.live ??= []).push([x, replica, y]);
  else band.newest.set(replica, y);
}

/** The band with its live points: at each x, every replica counts with its newest value up to
 * there, so that the first to report a step does not stand for all of them. Null where no value is
 * finite. */
export function spread(band) {
  const columns = {
    x: [...band.x],
    low: [...band.low],
    mean: [...band.mean],
    high: [...band.high],
  };
  const live = [...(band.live ?? [])].sort((a, b) => a[0] - b[0]);
  const newest = new Map(band.newest);
  live.forEach(([x, replica, y], i) => {
    newest.set(replica, y);
    if (live[i + 1]?.[0] === x) return;
    const known = [...newest.values()].filter((value) => value !== null);
    columns.x.push(x);
    columns.low.push(known.length ? Math.min(...known) : null);
    columns.mean.push(
      known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null,
    );
    columns.high.push(known.length ? Math.max(...known) : null);
  });
  return columns;
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
  return {
    id,
    name,
    x,
    y: smoothed(y, smooth),
    ghost: smooth > 0 ? y : null,
    odd,
    nan: odd,
    width: 1.5,
    ...look,
  };
}

const known = (column) => column.filter((value) => value !== null && value !== undefined);

/** The range of most values with a margin, {low, high}, and the number of outliers. For columns
 * that end in NaN (`diverged`), of which many values can be outliers: three times the range of the
 * middle half, and the first values. */
export function usual(columns, diverged = false) {
  const all = columns.flatMap(known).sort((a, b) => a - b);
  if (all.length < 20) return null;
  const at = (part) => all[Math.round(part * (all.length - 1))];
  const [edge, factor] = diverged ? [0.25, 3] : [0.05, 0.6];
  const firsts = diverged ? columns.flatMap((column) => known(column).slice(0, 1)) : [];
  const room = (at(1 - edge) - at(edge)) * factor || Math.abs(at(0.5)) * 0.1 || 1;
  const low = Math.max(all[0], Math.min(at(edge) - room, ...firsts));
  const high = Math.min(all.at(-1), Math.max(at(1 - edge) + room, ...firsts));
  return { low, high, clipped: all.filter((v) => v < low || v > high).length };
}

/** The newest value at or before index `i` of a column with gaps. */
export function lastKnown(column, i) {
  for (let k = Math.min(i, column.length - 1); k >= 0; k--) {
    if (column[k] !== null && column[k] !== undefined) return column[k];
  }
  return null;
}

/** The NaN or infinity that a line reported after index `i` of its `column` had its newest finite
 * value; null if that value is newer. `xs` are the places of the column. */
export function notFinite(one, xs, column, i) {
  const upTo = i < xs.length ? xs[i] : Infinity;
  const [at, kind] = one.nan
    .filter(([x]) => x <= upTo)
    .reduce((a, b) => (b[0] >= a[0] ? b : a), [-Infinity, null]);
  let last = Math.min(i, column.length - 1);
  while (last >= 0 && (column[last] === null || column[last] === undefined)) last -= 1;
  return last < 0 || at > xs[last] ? kind : null;
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
