// Replica x round: who took part in what. Own canvas; arrow keys read it, Enter or a click opens
// the round. Every outcome has a shape as well as a colour.

import { calm, cssColor, darkScheme, h, setText } from "../lib/dom.js";
import { hatch, sizeCanvas } from "../lib/palette.js";

const WORDS = {
  included: "included", uploaded: "uploaded, round open", late: "late", refused: "refused",
  void: "round void", missing: "missing", open: "not yet",
};
const SIZES = { small: { cell: 17, least: 7 }, large: { cell: 30, least: 9 } };
const GAP = 2;
const HEAD = 18; // the line of round numbers

export function heatmap(context, card) {
  const { store } = context;
  const size = SIZES[card.dataset.heatmap];
  const body = card.querySelector(".card-body");
  const names = h("div.heat-names", { "aria-hidden": "true" });
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Outcome of each replica in each round. Arrow keys read it, Enter opens a round." });
  const scroller = h("div.heat-scroll", {}, canvas);
  const say = h("p.heat-say", { "aria-live": "polite" });
  body.append(h("div.heat", {}, names, scroller), say, legend());
  let grid = null;
  let cursor = null; // {replica index, round index}
  let follow = true;

  function draw() {
    if (!store.run || !card.offsetParent) return;
    const replicas = store.replicaRows();
    const rounds = store.roundRows();
    const width = body.clientWidth - 32 - 30;
    const columns = Math.max(rounds.length, Math.min(store.run.total_rounds, Math.floor(width / (size.cell + GAP))));
    const fits = Math.floor(width / columns) - GAP;
    const cell = Math.max(size.least, Math.min(size.cell, fits));
    grid = { replicas, rounds, columns, cell, pitch: cell + GAP, outcomes: rounds.map((r) => outcomes(r, replicas)) };
    paint(canvas, grid, cursor, context.selected);
    label(names, grid);
    if (follow) scroller.scrollLeft = scroller.scrollWidth;
    speak();
  }

  function speak() {
    if (!grid) return;
    if (!cursor) {
      const done = grid.rounds.filter((r) => r.state === "committed").length;
      setText(say, grid.rounds.length ? `${done} of ${store.run.total_rounds} rounds committed` : "No round yet");
      return;
    }
    const round = grid.rounds[cursor.round];
    if (!round) return setText(say, `round ${cursor.round + 1}: not yet`);
    const row = round.contributions.find((c) => c.replica === grid.replicas[cursor.replica].number);
    const outcome = WORDS[grid.outcomes[cursor.round][cursor.replica]];
    setText(say, `Round ${round.number}, replica ${grid.replicas[cursor.replica].number}: ${outcome}${row?.reason ? ` (${row.reason})` : ""}`);
  }

  function place(event) {
    if (!grid) return null;
    const round = Math.floor(event.offsetX / grid.pitch);
    const replica = Math.floor((event.offsetY - HEAD) / grid.pitch);
    return round >= 0 && round < grid.rounds.length && replica >= 0 && replica < grid.replicas.length ? { round, replica } : null;
  }

  function move(to) {
    if (to?.round === cursor?.round && to?.replica === cursor?.replica) return;
    cursor = to;
    draw();
  }

  const open = () => cursor && grid.rounds[cursor.round] && context.select(grid.rounds[cursor.round].number);
  canvas.addEventListener("pointermove", (event) => move(place(event)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && move(null));
  canvas.addEventListener("click", (event) => {
    move(place(event));
    open();
  });
  canvas.addEventListener("blur", () => move(null));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (by && grid?.rounds.length) {
      event.preventDefault();
      const from = cursor ?? { round: grid.rounds.length - by[0] - (by[0] < 0 ? 1 : 0), replica: 0 };
      const bound = (value, count) => Math.min(Math.max(value, 0), count - 1);
      move({ round: bound(from.round + by[0], grid.rounds.length), replica: bound(from.replica + (cursor ? by[1] : 0), grid.replicas.length) });
      scroller.scrollTo({ left: cursor.round * grid.pitch - scroller.clientWidth / 2, behavior: calm.matches ? "auto" : "smooth" });
    } else if (event.key === "Enter") open();
    else if (event.key === "Escape") move(null);
  });
  scroller.addEventListener("scroll", () => (follow = scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 4));
  darkScheme.addEventListener("change", draw);
  new ResizeObserver(draw).observe(body);
  return (changed) => {
    if (changed.has("rounds") || changed.has("replicas") || changed.has("tab")) draw();
  };
}

function outcomes(round, replicas) {
  const by = new Map(round.contributions.map((c) => [c.replica, c.state]));
  const open = round.state === "collecting" || round.state === "planned";
  return replicas.map(({ number }) => {
    const state = by.get(number);
    if (state === "refused") return "refused";
    if (round.state === "void") return "void";
    return state ?? (open ? "open" : "missing");
  });
}

function label(names, { replicas, pitch, cell }) {
  const every = Math.ceil(13 / pitch);
  const shown = replicas.filter((_, i) => i % every === 0);
  names.style.width = `${Math.max(1, String(replicas.at(-1)?.number ?? 0).length) * 8 + 8}px`;
  names.style.height = `${HEAD + replicas.length * pitch}px`;
  names.replaceChildren(...shown.map((r) => {
    const name = h("span", {}, String(r.number));
    name.style.top = `${HEAD + replicas.indexOf(r) * pitch + cell / 2 - 9}px`;
    return name;
  }));
}

function paint(canvas, grid, cursor, selected) {
  const { replicas, rounds, columns, cell, pitch } = grid;
  const pen = sizeCanvas(canvas, columns * pitch, HEAD + replicas.length * pitch + 1);
  const looks = styles(pen);
  pen.font = `10.5px ${cssColor("--font")}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * pitch >= 24) ?? 1000;
  for (let i = 0; i < columns; i++) {
    const number = rounds[i]?.number ?? (rounds.at(-1)?.number ?? 0) + i - rounds.length + 1;
    if (number % every === 0 || (number === 1 && every < 5)) {
      pen.fillStyle = number === selected ? cssColor("--accent") : cssColor("--text-3");
      pen.fillText(String(number), i * pitch + cell / 2, 7);
    }
    for (let k = 0; k < replicas.length; k++) {
      const x = i * pitch;
      const y = HEAD + k * pitch;
      draw(pen, x, y, cell, rounds[i] ? grid.outcomes[i][k] : "open", looks);
    }
    if (rounds[i] && number === selected) frame(pen, i * pitch - 1, HEAD - 1, pitch, replicas.length * pitch, cssColor("--accent"));
  }
  if (cursor && rounds[cursor.round]) frame(pen, cursor.round * pitch - 1, HEAD + cursor.replica * pitch - 1, pitch, pitch, cssColor("--text"));
}

function frame(pen, x, y, w, h, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 1.5;
  pen.strokeRect(x + 0.25, y + 0.25, w - 0.5, h - 0.5);
}

function styles(pen) {
  const surface = cssColor("--surface");
  return {
    surface,
    included: { fill: cssColor("--p-compute") },
    uploaded: { fill: hatch(pen, cssColor("--p-upload")) },
    late: { fill: hatch(pen, cssColor("--s-warning"), surface), stroke: cssColor("--s-warning") },
    refused: { stroke: cssColor("--s-failed"), glyph: "x" },
    void: { fill: cssColor("--line-strong"), glyph: "-", ink: surface },
    missing: { stroke: cssColor("--line-strong") },
    open: { fill: cssColor("--grid") },
  };
}

function draw(pen, x, y, cell, outcome, looks) {
  const look = looks[outcome] ?? looks.missing;
  const round = Math.min(3, cell / 4);
  pen.beginPath();
  pen.roundRect(x, y, cell, cell, round);
  if (look.fill) {
    pen.fillStyle = look.fill;
    pen.fill();
  }
  if (look.stroke) {
    pen.beginPath();
    pen.roundRect(x + 0.6, y + 0.6, cell - 1.2, cell - 1.2, round);
    pen.strokeStyle = look.stroke;
    pen.lineWidth = 1.2;
    pen.stroke();
  }
  if (!look.glyph) return;
  pen.strokeStyle = look.ink ?? look.stroke;
  pen.lineWidth = Math.max(1.2, cell / 11);
  pen.beginPath();
  const inset = cell * 0.3;
  if (look.glyph === "x") {
    pen.moveTo(x + inset, y + inset);
    pen.lineTo(x + cell - inset, y + cell - inset);
    pen.moveTo(x + cell - inset, y + inset);
    pen.lineTo(x + inset, y + cell - inset);
  } else {
    pen.moveTo(x + inset, y + cell / 2);
    pen.lineTo(x + cell - inset, y + cell / 2);
  }
  pen.stroke();
}

function legend() {
  const list = h("p.heat-legend");
  const show = () => list.replaceChildren(...["included", "uploaded", "late", "refused", "void", "missing"].map((outcome) => {
    const key = h("canvas.key");
    const pen = sizeCanvas(key, 12, 12);
    draw(pen, 0, 0, 12, outcome, styles(pen));
    return h("span", {}, key, WORDS[outcome]);
  }));
  show();
  darkScheme.addEventListener("change", show);
  return list;
}
