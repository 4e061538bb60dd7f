// Options and size that all plots of uPlot have in common.

import { cssColor, token } from "./dom.js";

/** The width of a vertical axis, which fits its texts. */
const fitting = (_plot, texts) =>
  Math.max(50, ...(texts ?? []).map((text) => 12 + 6.4 * (text?.length ?? 0)));

/** Common plot options: frame size and page colours; `x` and `y` configure the axes. */
export function look(place, x, y, more) {
  const font = `11px ${token("--font")}`;
  const grid = { stroke: cssColor("--grid"), width: 1 };
  const axis = { stroke: cssColor("--text-3"), font, grid, ticks: { show: false }, gap: 6 };
  const horizontal = {
    ...axis,
    size: 28,
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
    padding: [8, 18, 0, 0], // half of the last label of the axis
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
