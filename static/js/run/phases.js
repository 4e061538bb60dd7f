// Where the time of each round goes: a stack of phases per round, own canvas.

import * as format from "../lib/format.js";
import { $, cssColor, darkScheme, h, setText, url } from "../lib/dom.js";
import { phaseFill, PHASES, sizeCanvas } from "../lib/palette.js";

const MARGIN = { left: 46, right: 10, top: 8, bottom: 26 };
const WIDEST = 44;

export function phaseChart(context, card) {
  const { store } = context;
  const place = $("[data-chart]", card);
  const canvas = $("canvas", place);
  const at = { readout: $("[data-readout]", card), legend: $("[data-legend]", card), table: $("[data-chart-table]", card), button: $("[data-table]", card), who: $("[data-who]", card) };
  const hidden = new Set((url.get("nophase") ?? "").split(",").filter(Boolean));
  let who = url.get("who") ?? "";
  let bars = [];
  let scale = null;
  let current = null; // number of the round under the cursor
  let table = url.get("table") === "phases";

  function collect() {
    return store.roundRows().map((round) => {
      const rows = round.contributions.filter((c) => (who === "" ? c.state !== "refused" : String(c.replica) === who) && sum(c.phases) > 0);
      if (!rows.length) return null;
      const phases = Object.fromEntries(PHASES.map((p) => [p, rows.reduce((all, c) => all + (c.phases[p] ?? 0), 0) / rows.length]));
      return { number: round.number, state: round.state, phases };
    }).filter(Boolean);
  }

  function draw() {
    if (!store.run || !place.clientWidth) return;
    bars = collect();
    place.toggleAttribute("data-empty", !bars.length);
    if (!bars.length) place.dataset.empty = "The first bar appears when a round is committed";
    canvas.hidden = !bars.length;
    if (bars.length) scale = paint(canvas, place, bars, hidden, current);
    read();
    if (table) fill(at.table, bars);
  }

  function read() {
    const bar = bars.find((b) => b.number === current) ?? bars.at(-1);
    if (!bar) return setText(at.readout, "");
    const total = sum(bar.phases);
    at.readout.replaceChildren(h("b", {}, `Round ${bar.number}`), ` took ${format.duration(total)}: `,
      PHASES.filter((p) => bar.phases[p] > 0).map((p) => `${p} ${format.duration(bar.phases[p])}`).join(" · "));
  }

  const under = (event) => {
    if (!scale) return null;
    const index = Math.floor((event.offsetX - MARGIN.left) / scale.slot);
    return bars[index]?.number ?? null;
  };

  function move(to) {
    if (to === current) return;
    current = to;
    draw();
  }

  canvas.addEventListener("pointermove", (event) => move(under(event)));
  canvas.addEventListener("pointerleave", () => move(null));
  canvas.addEventListener("click", (event) => under(event) !== null && context.select(under(event)));
  place.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      event.preventDefault();
      const index = bars.findIndex((b) => b.number === current);
      const next = index < 0 ? (by > 0 ? 0 : bars.length - 1) : Math.min(Math.max(index + by, 0), bars.length - 1);
      move(bars[next]?.number ?? null);
    } else if (event.key === "Enter" && current !== null) context.select(current);
    else if (event.key === "Escape") move(null);
  });
  at.who.addEventListener("change", () => {
    who = at.who.value;
    url.set({ who });
    draw();
  });
  at.button.addEventListener("click", () => {
    table = !table;
    url.set({ table: table ? "phases" : null });
    mode();
    draw();
  });
  function mode() {
    at.table.hidden = !table;
    place.hidden = table;
    at.button.setAttribute("aria-pressed", String(table));
  }
  function legend() {
    at.legend.replaceChildren(...PHASES.map((phase) => {
      const key = h("canvas.key");
      const button = h("button", { type: "button", "aria-pressed": String(!hidden.has(phase)) }, key, h("span", {}, phase));
      button.addEventListener("click", () => {
        if (!hidden.delete(phase)) hidden.add(phase);
        button.setAttribute("aria-pressed", String(!hidden.has(phase)));
        url.set({ nophase: [...hidden].join(",") });
        draw();
      });
      const pen = sizeCanvas(key, 14, 12);
      pen.fillStyle = phaseFill(pen, phase);
      pen.fillRect(0, 0, 14, 12);
      return button;
    }));
  }

  legend();
  mode();
  darkScheme.addEventListener("change", () => (legend(), draw()));
  new ResizeObserver(draw).observe(place);
  return (changed) => {
    if (changed.has("replicas")) choices(store, at.who, who);
    if (changed.has("rounds") || changed.has("run") || changed.has("tab")) draw();
  };
}

const sum = (phases) => Object.values(phases ?? {}).reduce((all, s) => all + s, 0);

function choices(store, select, chosen) {
  for (const { number } of store.replicaRows()) {
    if (!$(`option[value="${number}"]`, select)) select.append(h("option", { value: number }, `Replica ${number}`));
  }
  select.value = chosen;
}

/** Paint the stacks; answers with the width of a slot. */
function paint(canvas, place, bars, hidden, current) {
  const width = place.clientWidth;
  const height = place.clientHeight;
  const pen = sizeCanvas(canvas, width, height);
  const plot = { w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
  const shown = PHASES.filter((phase) => !hidden.has(phase));
  const totals = bars.map((bar) => shown.reduce((all, p) => all + bar.phases[p], 0));
  const top = niceCeiling(Math.max(...totals, 1e-3));
  const slot = Math.min(plot.w / bars.length, WIDEST);
  const gap = slot > 5 ? Math.min(slot * 0.22, 5) : 0;
  const y = (seconds) => MARGIN.top + plot.h - (seconds / top) * plot.h;

  pen.font = `11px ${cssColor("--font")}`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let i = 0; i <= 4; i += 2) {
    const at = Math.round(y((top * i) / 4)) + 0.5;
    pen.fillStyle = cssColor("--grid");
    pen.fillRect(MARGIN.left, at - 0.5, plot.w, 1);
    pen.fillStyle = cssColor("--text-3");
    pen.fillText(i ? format.duration((top * i) / 4).replace(".0 s", " s") : "0", MARGIN.left - 8, at);
  }

  const fills = Object.fromEntries(shown.map((phase) => [phase, phaseFill(pen, phase)]));
  // More rounds than pixels: neighbours share one, and the longest of them is drawn.
  const perPixel = Math.max(1, Math.ceil(1 / slot));
  bars.forEach((bar, i) => {
    if (perPixel > 1 && totals[i] < Math.max(...totals.slice(i - (i % perPixel), i - (i % perPixel) + perPixel))) return;
    let base = 0;
    const x = MARGIN.left + i * slot + gap / 2;
    if (bar.number === current) {
      pen.fillStyle = cssColor("--hover");
      pen.fillRect(MARGIN.left + i * slot, MARGIN.top, slot, plot.h);
    }
    for (const phase of shown) {
      const seconds = bar.phases[phase];
      if (seconds <= 0) continue;
      pen.fillStyle = fills[phase];
      pen.fillRect(x, y(base + seconds), Math.max(slot - gap, 1), Math.max(y(base) - y(base + seconds), 0.5));
      base += seconds;
    }
  });

  pen.fillStyle = cssColor("--text-3");
  pen.textAlign = "center";
  const every = Math.max(1, Math.ceil(34 / slot));
  bars.forEach((bar, i) => {
    if (bar.number % niceStep(every) === 0 || (i === 0 && every === 1)) pen.fillText(String(bar.number), MARGIN.left + (i + 0.5) * slot, height - MARGIN.bottom + 14);
  });
  return { slot };
}

const niceStep = (n) => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((s) => s >= n) ?? n;

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((m) => m * power).find((m) => m >= value) ?? value;
}

function fill(place, bars) {
  place.replaceChildren(
    h("table", {},
      h("caption.visually-hidden", {}, "Seconds per phase and round"),
      h("thead", {}, h("tr", {}, h("th.num", { scope: "col" }, "Round"), ...PHASES.map((p) => h("th.num", { scope: "col" }, p)))),
      h("tbody", {}, ...[...bars].reverse().map((bar) =>
        h("tr", {}, h("th.num", { scope: "row" }, String(bar.number)), ...PHASES.map((p) => h("td.num", {}, format.duration(bar.phases[p]))))))));
}
