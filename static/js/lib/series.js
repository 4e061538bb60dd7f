// Columns of a chart: in order, and read where they have gaps.

/** Strictly rising x with its y, as the chart needs it; of points at one place the last stays. */
export function rising(x, y) {
  const order = x.map((_, i) => i).sort((a, b) => x[a] - x[b] || a - b);
  const kept = order.filter((at, i) => i === order.length - 1 || x[order[i + 1]] !== x[at]);
  return [kept.map((at) => x[at]), kept.map((at) => y[at])];
}

/** The newest value at or before place `i` of a column with gaps. */
export function lastKnown(column, i) {
  for (let k = Math.min(i, column.length - 1); k >= 0; k--) {
    if (column[k] !== null && column[k] !== undefined) return column[k];
  }
  return null;
}
