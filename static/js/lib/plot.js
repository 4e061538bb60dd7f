// Options and size that all plots of uPlot have in common.

import { cssColor, token } from "./dom.js";

/** The width of a text of an axis, with some room. */
const widthOf = (text) => 12 + 6.4 * (text?.length ?? 0);

/** The width of a vertical axis, which fits its texts. */
const fitting = (_plot, texts) => Math.max(50, ...(texts ?? []).map(widthOf));

/** Common plot options: frame size and page colours; `x` and `y` configure the axes. */
export function look(place, x, y, more) {
  const font = `11px ${token("--font")}`;
  const grid = { stroke: cssColor("--grid"), width: 1 };
  const axis = { stroke: cssColor("--text-3"), font, grid, ticks: { show: false }, gap: 6 };
  let last = ""; // the last label of the horizontal axis, half of which can be beyond the plot
  const horizontal = {
    ...axis,
    size: (_plot, texts) => {
      last = texts?.at(-1);
      return 28;
    },
    gap: 4,
    labelFont: font,
    labelSize: 18,
    labelGap: 0,
    ...x,
  };
  return {
    // A hidden frame has no size; it is resized when shown.
    width: place.clientWidth || 600,
    height: place.clientHeight || 200,
    padding: [8, () => Math.max(18, widthOf(last) / 2), 0, 0],
    legend: { show: false },
    axes: [horizontal, ...[y].flat().map((one) => ({ ...axis, size: fitting, ...one }))],
    ...more,
  };
}

/** Resize the plot returned by `plot()` with its frame. */
export function follow(place, plot) {
  const resize = () => {
    const { clientWidth: width, clientHeight: height } = place;
    if (width) plot()?.setSize({ width, height });
  };
  new ResizeObserver(resize).observe(place);
}
