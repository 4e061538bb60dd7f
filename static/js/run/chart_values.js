// The values of a chart outside its plot: a table, and files to save.

import uPlot from "../lib/uplot.js";
import { h, table } from "../lib/dom.js";
import { axisText, AXES } from "./axes.js";
import { lastKnown } from "./curves.js";

const TABLE_ROWS = 200;

/** A table of at most TABLE_ROWS rows. `columns` are pairs of a name and values at `x`. */
export function valuesTable(title, axis, x, columns, text) {
  const every = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
  const picked = x.map((_, i) => i).filter((i) => i % every === 0 || i === x.length - 1);
  const heads = [AXES[axis], ...columns.map(([name]) => name)].map((name) => `#${name}`);
  const cell = (column, i) => h("td.num", {}, text(lastKnown(column, i)));
  const rows = picked.map((i) => h("tr", {},
    h("th.num", { scope: "row" }, axisText(axis, x[i])),
    columns.map(([, column]) => cell(column, i))));
  return table("table", `${title} by ${AXES[axis]}`, heads, h("tbody", {}, rows));
}

/** Save the points of the lines, unsmoothed; gaps are empty. */
export function saveCsv(name, axis, lines) {
  const columns = lines.flatMap(({ name, x, y, band, ghost, share }) => {
    if (band) return [[`${name} low`, ...band[0]], [`${name} high`, ...band[1]]];
    return [[name, x, ghost ?? share ?? y]];
  });
  const data = uPlot.join(columns.map(([, x, y]) => [x, y]));
  const rows = data[0].map((_, i) => data.map((column) => column[i] ?? ""));
  const head = [axis, ...columns.map(([name]) => name)];
  const text = [head, ...rows].map((row) => row.join(",")).join("\n");
  save(`${name}.csv`, new Blob([text], { type: "text/csv" }));
}

export function save(name, blob) {
  const href = URL.createObjectURL(blob);
  h("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 1000);
}
