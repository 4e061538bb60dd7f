// Efficiency, its two factors and the traffic over H; the chosen H is a line with its name.

import uPlot from "../lib/uplot.js";
import * as format from "../lib/format.js";
import { clamp, cssColor, h, token } from "../lib/dom.js";
import { swatch } from "../lib/palette.js";
import { follow, look } from "../lib/plot.js";

const LINES = [
  { name: "efficiency", label: "Efficiency", hue: "--r-0", width: 2.5, dash: [] },
  { name: "utilisation", label: "Utilisation", hue: "--r-2", width: 1.5, dash: [7, 3] },
  { name: "goodput", label: "Goodput under failures", hue: "--r-3", width: 1.5, dash: [2, 2.5] },
  {
    name: "total_bytes",
    label: "Total traffic (right axis)",
    hue: "--r-1",
    width: 1.75,
    dash: [9, 3, 2, 3],
  },
];
export function planChart(place, legend, choose) {
  let plot = null;
  let plan = null;
  legend.replaceChildren(
    ...LINES.map((line) => h("span", {}, swatch(line.hue, line.dash, line.width), line.label)),
  );

  function mark(u) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio || 1;
    const x = Math.round(u.valToPos(plan.chosen.sync_every, "x", true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = cssColor("--text");
    ctx.lineWidth = ratio;
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.arc(x, u.valToPos(plan.chosen.efficiency * 100, "y", true), 4.5 * ratio, 0, 7);
    ctx.fill();
    ctx.font = `600 ${12 * ratio}px ${token("--font")}`;
    const right = x < bbox.left + bbox.width / 2;
    ctx.textAlign = right ? "left" : "right";
    ctx.fillText(
      `H ${plan.chosen.sync_every}`,
      x + (right ? 7 : -7) * ratio,
      bbox.top + 13 * ratio,
    );
    ctx.restore();
  }

  function options() {
    const round = (t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9;
    const decades = (show) => (u, ticks) => ticks.map((t) => (t && round(t) ? show(t) : ""));
    const y = [
      { size: 44, values: (u, ticks) => ticks.map((t) => `${t}%`) },
      { scale: "bytes", side: 1, size: 66, grid: { show: false }, values: decades(format.size) },
    ];
    return look(place, { values: decades(format.count) }, y, {
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, distr: 3 }, y: { range: [0, 100] }, bytes: { distr: 3 } },
      series: [
        {},
        ...LINES.map(({ name, hue, width, dash }) => ({
          stroke: cssColor(hue),
          width,
          dash,
          points: { show: false },
          scale: name === "total_bytes" ? "bytes" : "y",
        })),
      ],
      hooks: { draw: [mark] },
    });
  }

  const at = (by) => {
    const place = plan.curve.findIndex((a) => a.sync_every === plan.chosen.sync_every);
    return plan.curve[clamp(place + by, 0, plan.curve.length - 1)].sync_every;
  };

  place.addEventListener(
    "click",
    () => plot && plot.cursor.idx !== null && choose(plot.data[0][plot.cursor.idx]),
  );
  place.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -1e6, End: 1e6 }[
      event.key
    ];
    if (!by || !plan) return;
    event.preventDefault();
    choose(at(by));
  });
  follow(place, () => plot);

  return {
    draw(newPlan) {
      plan = newPlan;
      const data = [
        newPlan.curve.map((a) => a.sync_every),
        ...LINES.map(({ name }) =>
          newPlan.curve.map((a) => (name === "total_bytes" ? a[name] : a[name] * 100)),
        ),
      ];
      plot?.destroy();
      plot = new uPlot(options(), data, place);
    },
  };
}
