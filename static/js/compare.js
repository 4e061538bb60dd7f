// Loss of several runs by tokens, by time since the first step, or by money. Tables and curves are
// fetched again when the live stream reports a change of a run.

import "./base.js";
import * as format from "./lib/format.js";
import { $, $$, cssColor, press, setText, url } from "./lib/dom.js";
import { getJSON, Live } from "./lib/live.js";
import { refreshed } from "./lib/part.js";
import { replicaDash, replicaHue, replicaSwatch } from "./lib/palette.js";
import { Chart } from "./run/chart.js";
import { rising } from "./run/curves.js";

const CHOICES = { series: ["eval_loss", "loss"], x: ["tokens", "wall", "money"] };
const KEPT = ["series", "x", "table", "hide"]; // when another baseline is pinned

const EVERY_MS = 10_000;

function swatches(part) {
  for (const place of $$("[data-swatch]", part))
    place.append(replicaSwatch(Number(place.dataset.swatch)));
}

function comparePage() {
  swatches(document);
  const card = $("[data-compare]");
  if (card) begin(card);
}

function begin(card) {
  const chosen = {};
  for (const [name, values] of Object.entries(CHOICES)) {
    chosen[name] = values.find((value) => value === url.get(name)) ?? values[0];
  }
  const tables = new Set(url.get("table") === "1" ? [card.dataset.plot] : []);
  const view = { x: "", from: null, to: null };
  const spec = { lines, text: format.loss, empty: "" };
  const board = {
    view,
    tables,
    zoom,
    reset: () => zoom(null, null),
    toggleTable: () => change({}, !tables.size),
  };
  const chart = new Chart(board, card, spec);

  function lines({ runs, curves }) {
    const without = [];
    const drawn = runs.flatMap((run, number) => {
      const curve = curves.find((c) => c.run === run.id && c.series === chosen.series);
      if (!curve?.[chosen.x]) {
        without.push(`${run.name} (${curve ? "unknown price" : "no data yet"})`);
        return [];
      }
      const [x, y] = rising({ x: curve[chosen.x], y: curve.value });
      return [
        {
          id: run.id,
          name: run.name,
          x,
          y,
          odd: [],
          nan: [],
          points: x.length < 3,
          swatch: () => replicaSwatch(number),
          color: cssColor(replicaHue(number)),
          dash: replicaDash(number),
          width: number ? 1.5 : 2.5,
        },
      ];
    });
    const note = $("[data-note]", card);
    note.hidden = !without.length;
    setText(note, `Not shown: ${without.join(", ")}`);
    return drawn;
  }

  function draw() {
    view.x = chosen.x === "wall" ? "relative" : chosen.x;
    spec.empty = chosen.x === "money" ? "No run has a known price" : "No curves yet";
    for (const group of $$("[data-choose]", card)) {
      for (const button of $$("button", group))
        press(button, button.value === chosen[group.dataset.choose]);
    }
    chart.draw();
  }

  function zoom(from, to) {
    Object.assign(view, { from, to });
    draw();
  }

  function change(values, table = tables.size > 0) {
    Object.assign(chosen, values);
    if (table) tables.add(chart.id);
    else tables.clear();
    if (values.x) Object.assign(view, { from: null, to: null });
    const address = { table: table ? 1 : null };
    for (const [name, [usual]] of Object.entries(CHOICES)) {
      address[name] = chosen[name] === usual ? null : chosen[name];
    }
    url.set(address);
    draw();
  }

  for (const group of $$("[data-choose]", card)) {
    group.addEventListener("click", ({ target }) => {
      if (target.value) change({ [group.dataset.choose]: target.value });
    });
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-keep]");
    if (!link) return;
    const target = new URL(link.href);
    for (const name of KEPT) if (url.get(name)) target.searchParams.set(name, url.get(name));
    link.href = target.href;
  });

  async function load() {
    chart.data = await getJSON(card.dataset.json);
    draw();
  }

  load().catch(() => {
    $("[data-chart]", card).dataset.empty =
      "Loading the curves failed. Reload the page to try again.";
  });
  if (card.dataset.stream) follow(card.dataset.stream, load);
}

/** Tables and curves of runs that still work. */
function follow(stream, load) {
  const tables = refreshed($("[data-part]"), EVERY_MS, (content) => {
    swatches(content);
    load().catch(() => {}); // the curves shown stay; the next change loads them again
  });
  new Live({
    dot: $("[data-conn]"),
    stream,
    topic: "list",
    after: () => "",
    onDelta: tables.soon,
    poll: tables.now,
  }).start();
}

comparePage();
