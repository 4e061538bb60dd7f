// The charts of a page section under one toolbar, whose options apply to all charts and are kept in
// the address. The server samples the visible window. Points of the live stream are appended, and
// the window is fetched again after many of them.

import { $, $$, clamp, h, isShown, keyed, marked, press, setText, timed, url } from "../lib/dom.js";
import { getFirst, getJSON, getLater } from "../lib/live.js";
import { RUN_ENDED } from "../lib/states.js";
import { add, liveX, unpacked, widen } from "./curves.js";
import { AXES } from "./axes.js";
import { Chart } from "./chart.js";
import { panelGrid } from "./panels.js";
import { specOf } from "./specs.js";
import { replicaSwatch } from "../lib/palette.js";
import { roundStrip } from "./strip.js";

const DEFAULT_SMOOTH = 0.6;
const POINTS = { least: 600, most: 4000, perPixel: 3 }; // requested for a chart of its width
const FRESH = 600; // live points after which a chart is fetched again
const AGAIN_MS = 3000; // minimum interval between fetches
const ZOOMED = "zoomed"; // state of a history entry that a zoom made
const ZOOMS = ["back", "all", "earlier", "later"];
const SWITCHES = ["logy", "logx"];

const MOST_LINES = 16; // more replicas are requested by number

/** Numbers of replicas in the address. */
const replicasOf = (text) =>
  new Set(
    (text ?? "")
      .split(",")
      .filter((part) => /^\d+$/.test(part))
      .map(Number),
  );

/** A number of the address; null if it has none. */
function number(name) {
  const value = Number(url.get(name) ?? NaN);
  return Number.isFinite(value) ? value : null;
}

export function board(context, place) {
  const { store, page } = context;
  // The horizontal axis, unless the address has another.
  const usual = place.dataset.usual ?? "step";
  const root = place.closest("[data-panel]") ?? page;
  const at = marked(
    place,
    "x",
    "smooth",
    "smooth-out",
    "logy",
    "logx",
    "clip",
    "clip-out",
    ...ZOOMS,
  );
  const self = {
    view: fromAddress(), tables: new Set((url.get("table") ?? "").split(",").filter(Boolean)),
    zoom, reset, toggleTable,
    /** The replicas whose lines are drawn; null draws those of all. */
    highlighted: page.dataset.own ? null : replicasOf(url.get("replicas")),
    drawn: (chart) => chart === charts[0] && strip?.draw(),
    /** Why a chart of the run has no lines. */
    emptyText({ empty }) {
      if (self.view.from !== null) return "No data in this range";
      if (page.dataset.ended || RUN_ENDED.has(store.run?.state))
        return "The run ended without data for this chart";
      return store.run && empty.begun(store.run)
        ? "No replica has reported this figure"
        : empty.waiting;
    },
  };
  const charts = $$("[data-plot]", root).map(
    (card) => new Chart(self, card, specOf(card.dataset.plot)),
  );
  const asked = new Map(); // chart -> its latest request
  const outdated = new Set(); // charts that got points since they were drawn
  let loaded = false;
  const legend = $("[data-board-legend]", root);
  const stripPlace = $("[data-strip]", root);
  const strip = stripPlace && roundStrip(context, stripPlace, {
    axis: () => self.view.x,
    range: () => {
      const frame = charts.map((chart) => chart.frame()).find(Boolean);
      return frame && { ...frame, left: frame.left - stripPlace.getBoundingClientRect().left };
    },
    origin: () => charts.find((chart) => chart.data)?.data.origin ?? 0,
  });
  root.addEventListener("plot-added", ({ target }) => {
    const chart = new Chart(self, target, specOf(target.dataset.plot));
    charts.push(chart);
    if (loaded) ask(chart);
  });
  const grid = $("[data-panels]", root);
  const panels =
    grid &&
    panelGrid(grid, page, {
      add: (card) => {
        const chart = new Chart(self, card, specOf(card.dataset.plot));
        charts.push(chart);
        if (loaded) ask(chart);
      },
      drop: (card) =>
        charts.splice(
          charts.findIndex((chart) => chart.card === card),
          1,
        ),
      changed: () =>
        loaded &&
        charts.forEach((chart) => (chart.data ? chart.draw() : asked.has(chart) || ask(chart))),
    });

  function fromAddress() {
    const x = Object.hasOwn(AXES, url.get("x") ?? "") ? url.get("x") : usual;
    const [from, to] = [number("from"), number("to")];
    return {
      x,
      from: to > from ? from : null,
      to: to > from ? to : null,
      smooth: url.get("smooth") === null ? DEFAULT_SMOOTH : clamp(number("smooth") ?? 0, 0, 0.98),
      logy: url.get("log")?.includes("y") ?? false,
      logx: url.get("log")?.includes("x") ?? false,
      clip: { 1: true, 0: false }[url.get("clip")] ?? null, // null: of charts that end in NaN
    };
  }

  const pointsFor = ({ at: { chart } }) =>
    clamp(Math.round(chart.clientWidth * POINTS.perPixel), POINTS.least, POINTS.most);

  async function ask(chart, get = getJSON) {
    const request = { fresh: 0, at: performance.now(), late: [] };
    asked.set(chart, request);
    const { x, from, to } = self.view;
    const query = new URLSearchParams({ of: chart.spec.of.join(","), x, points: pointsFor(chart) });
    if (from !== null) query.set("from", from);
    if (to !== null) query.set("to", to);
    if (chart.spec.last) query.set("last", 1);
    if (page.dataset.own) query.set("own", page.dataset.own);
    else if (url.get("replicas")) query.set("replica", url.get("replicas"));
    try {
      const answer = await get(`${page.dataset.series}?${query}`);
      if (asked.get(chart) !== request) return; // a newer request replaced it
      const band = answer.band && { ...unpacked(answer.band), newest: new Map(answer.band.newest) };
      chart.data = { ...answer, curves: answer.curves.map(unpacked), band };
      // Arrived while the request was pending.
      for (const columns of request.late) append(chart, columns);
      request.late = null;
      chart.draw();
      timed(`chart ${chart.id}`, request.at);
      outcome();
    } catch {
      request.late = null; // the connection indicator shows the state
    }
  }

  function load() {
    loaded = true;
    const cards = $$("[data-plot]", root);
    const place = (chart) => cards.indexOf(chart.card);
    const inOrder = [...charts].sort((a, b) => place(a) - place(b));
    inOrder.forEach((chart, i) => ask(chart, i ? getLater : getFirst));
  }

  function append(chart, columns) {
    const { data } = chart;
    const { x: axis, to } = self.view;
    if (!chart.spec.of.includes(columns.series) || !data) return;
    if (
      to !== null &&
      columns.replica !== null &&
      liveX(columns, { unit: 1 }, axis, data.origin)[0] > to
    )
      return;
    const request = asked.get(chart);
    const curve = data.curves.find(
      (c) => c.series === columns.series && c.replica === columns.replica,
    );
    const unit = curve?.unit ?? data.curves.find((c) => c.series === columns.series)?.unit;
    if (unit === undefined) return soon(chart);
    const xs = liveX(columns, { unit }, axis, data.origin);
    for (let i = 0; i < xs.length; i++) {
      if (to !== null && xs[i] > to) break;
      if (curve && !add(curve, xs[i], columns.value[i])) request.fresh += FRESH;
      if (data.band && columns.replica !== null)
        widen(data.band, columns.replica, xs[i], columns.value[i]);
    }
    for (const [i, kind] of columns.nonfinite ?? [])
      if (curve) curve.odd.push([curve.x.lastIndexOf(xs[i]), kind]);
    outdated.add(chart);
    data.points += xs.length;
    data.total += xs.length;
    request.fresh += xs.length;
    if (!curve || request.fresh > FRESH) soon(chart);
  }

  function soon(chart) {
    const request = asked.get(chart);
    if (request.timer) return;
    const delay_ms = Math.max(0, request.at + AGAIN_MS - performance.now());
    request.timer = setTimeout(() => isShown(place) && ask(chart), delay_ms);
  }

  /** Draw the lines of these replicas. More than MOST_LINES replicas are requested by number. */
  function highlight(numbers) {
    self.highlighted = numbers;
    url.set({ replicas: [...numbers].join(",") });
    chips();
    if (store.replicas.size > MOST_LINES) load();
    else charts.forEach((chart) => chart.restyle());
  }

  /** The legend of the board: one chip for each replica, or a field for its number. */
  function chips() {
    if (!legend || !self.highlighted) return;
    const rows = store.replicaRows();
    const many = rows.length > MOST_LINES;
    legend.hidden = rows.length < 2;
    const shown = many ? rows.filter((row) => self.highlighted.has(row.number)) : rows;
    keyed(
      $("[data-chips]", legend),
      shown,
      (row) => row.number,
      ({ number }) =>
        h(
          "button",
          { type: "button", onclick: () => toggle(number) },
          replicaSwatch(number),
          `Replica ${number}`,
        ),
      (button, { number }) => press(button, self.highlighted.has(number)),
    );
    $("[data-highlight]", legend).hidden = !many;
  }

  function toggle(number) {
    const numbers = new Set(self.highlighted);
    if (!numbers.delete(number)) numbers.add(number);
    highlight(numbers);
  }
  $("[data-highlight]", legend ?? root)?.addEventListener("change", (event) => {
    const number = Number(event.target.value);
    const known = event.target.value !== "" && store.replicas.has(number);
    event.target.setCustomValidity(
      known ? "" : `Enter a number from 0 to ${store.replicaRows().at(-1)?.number ?? 0}`,
    );
    if (!event.target.reportValidity()) return;
    event.target.value = "";
    toggle(number);
  });

  /** `push`: the browser's Back returns to the view before. */
  function change(values, { again = false, push = false } = {}) {
    Object.assign(self.view, values);
    const { x, from, to, smooth, logx, logy, clip } = self.view;
    url.set(
      {
        x: x === usual ? null : x,
        from,
        to,
        smooth: smooth === DEFAULT_SMOOTH ? null : smooth,
        log: `${logx ? "x" : ""}${logy ? "y" : ""}`,
        clip: clip === null ? null : Number(clip),
        table: [...self.tables].join(","),
      },
      { push, state: ZOOMED },
    );
    controls();
    charts.forEach((chart) => chart.draw()); // draw now with the loaded points
    if (again) load();
    outcome();
  }

  const short = (value) => Number(value.toPrecision(10));
  function zoom(from, to, { push = true } = {}) {
    if (to > from) change({ from: short(from), to: short(to) }, { again: true, push });
  }
  function reset() {
    change({ from: null, to: null }, { again: true, push: self.view.from !== null });
  }
  const back = () => (history.state === ZOOMED ? history.back() : reset());
  function pan(by) {
    const { from, to } = self.view;
    if (from !== null) zoom(from + (to - from) * by, to + (to - from) * by, { push: false });
  }
  function toggleTable(id) {
    if (!self.tables.delete(id)) self.tables.add(id);
    change({});
  }

  function controls() {
    const { view } = self;
    for (const button of $$("button", at.x)) press(button, button.value === view.x);
    for (const name of SWITCHES) press(at[name], view[name]);
    press(at.clip, clips());
    at.logx.disabled = view.x === "wall" || view.x === "relative";
    at.smooth.value = view.smooth;
    setText(at["smooth-out"], view.smooth ? view.smooth.toFixed(2) : "off");
    const zoomed = view.from !== null;
    for (const name of ZOOMS) at[name].disabled = !zoomed;
  }
  const clips = () => self.view.clip ?? charts.some((chart) => chart.clipped() > 0);
  function outcome() {
    const clipped = charts.reduce((all, chart) => all + chart.clipped(), 0);
    setText(at["clip-out"], clips() ? `${clipped} clipped` : "");
    press(at.clip, clips());
  }

  at.x.addEventListener("click", (event) => {
    if (!event.target.value || event.target.value === self.view.x) return;
    change({ x: event.target.value, from: null, to: null }, { again: true });
  });
  at.smooth.addEventListener("input", () => change({ smooth: Number(at.smooth.value) }));
  for (const name of SWITCHES) {
    at[name].addEventListener("click", () => change({ [name]: !self.view[name] }));
  }
  at.clip.addEventListener("click", () => change({ clip: !clips() }));
  at.back.addEventListener("click", back);
  at.all.addEventListener("click", reset);
  at.earlier.addEventListener("click", () => pan(-0.5));
  at.later.addEventListener("click", () => pan(0.5));
  /** The browser or another toolbar can change the address. */
  function reread() {
    const before = JSON.stringify(self.view);
    self.view = fromAddress();
    if (self.highlighted) self.highlighted = replicasOf(url.get("replicas"));
    panels?.read();
    chips();
    controls();
    if (loaded && isShown(place) && before !== JSON.stringify(self.view)) load();
  }
  addEventListener("popstate", reread);
  controls();

  // Immediately, not in the next frame: two deltas can arrive before it.
  store.listen((changed) => {
    if (!changed.has("points")) return;
    if (store.fresh === null) loaded = false;
    for (const columns of loaded ? store.fresh : []) {
      for (const chart of charts) {
        const { late } = asked.get(chart);
        if (late) late.push(columns);
        else append(chart, columns);
      }
    }
  });
  function draw(some) {
    for (const chart of some) chart.draw();
    outdated.clear();
  }
  return (changed) => {
    if (!store.run || !isShown(place)) return;
    if (changed.has("tab")) reread();
    if (changed.has("replicas") || changed.has("tab")) chips();
    if (changed.has("rounds")) strip?.draw();
    if (!loaded) load();
    else if (changed.has("tab")) draw(charts);
    else
      draw(charts.filter((chart) =>
        outdated.has(chart) || (changed.has("run") && !chart.lines.length)));
  };
}
