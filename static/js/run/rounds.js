// One round in detail, and the table of all rounds.

import * as format from "../lib/format.js";
import { cellOf, h, icon, keyed, setState, setText, stateBadge, table } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";
import { RUN_ENDED } from "../lib/states.js";
import { timeElement } from "../lib/times.js";
import { WHY } from "./grid.js";
import { PHASES, phaseFill, replicaSwatch, sizeCanvas } from "../lib/palette.js";

const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
/** Bytes of all contributions. Telemetry reports them later than the round: until then, unknown. */
const bytes = (rows, ...names) =>
  format.size(names.reduce((total, name) => total + sum(rows, name), 0) || null);

export function roundDetail(context, card) {
  const { store } = context;
  let shown = "";
  const older = new Map(); // rounds outside the snapshot, by number; null: requested
  async function ask(number) {
    older.set(number, null);
    try {
      older.set(number, (await getJSON(context.page.dataset.round.replace("/0.json", `/${number}.json`))).round);
      show();
    } catch {
      older.delete(number); // not found, or the connection indicator shows the state
    }
  }
  function show() {
    const number = context.selected;
    const round = store.rounds.get(number) ?? older.get(number);
    if (!round && number && store.run && !older.has(number)) ask(number);
    card.hidden = !round;
    const now = JSON.stringify(round ?? null);
    if (now === shown) return;
    shown = now;
    if (round) card.replaceChildren(...detail(round, context));
  }
  return (changed) => changed.has("rounds") && show();
}

/** The straggler: of the included contributions, the one that waited least. Each one's own
 * clock measured that, so no two are compared. `lag`: how much longer the typical one waited. */
function straggler(round) {
  const waits = round.contributions
    .filter((row) => row.state === "included" && row.phases?.compute)
    .map((row) => [row.phases.wait ?? 0, row.replica])
    .sort((a, b) => a[0] - b[0]);
  if (waits.length < 2) return null;
  return { replica: waits[0][1], lag: waits[waits.length >> 1][0] - waits[0][0] };
}

function late(round) {
  const one = straggler(round);
  return one ? `replica ${one.replica}, ${format.duration(one.lag)}` : format.UNKNOWN;
}

/** The known times `name` of the contributions. */
const times = (round, name) => round.contributions.map((row) => Date.parse(row[name])).filter(Number.isFinite);

/** How many replicas contributed; before the plan, how many have uploaded. */
function contributors(round, { run }) {
  if (round.state !== "collecting") return `${round.contributors} of ${run.target}`;
  const uploaded = round.contributions.filter((row) => row.state === "uploaded").length;
  return `${uploaded} of ${run.target} uploaded`;
}

const clock = (time) => format.clock(time, { seconds: true });

/** When the first replica began the round; NaN if unknown. */
const opened = (round) => times(round, "started_at").sort((a, b) => a - b)[0] ?? NaN;

function detail(round, { store, select, page }) {
  const rows = round.contributions;
  const took_ms = Math.max(...times(round, "committed_at")) - opened(round);
  const facts = [
    ...("fragments" in page.dataset ? [["Fragment", `${round.fragment} (0 to ${page.dataset.fragments - 1})`]] : []),
    ["Contributors", contributors(round, store)],
    ["Plan", round.mode || format.UNKNOWN],
    ["Straggler and lag", late(round)],
    ["Outer learning rate", page.dataset.outerLr],
    ["Training loss", format.loss(round.loss)],
    ["Evaluation loss", format.loss(round.eval_loss)],
    ["Duration", format.duration(took_ms / 1000)],
    ["Traffic", `${bytes(rows, "bytes_up")} up, ${bytes(rows, "bytes_down")} down`],
    ["Tokens so far", format.count(round.tokens_total || null)],
    ["Opened", timeElement(opened(round), "clock")],
    ["Committed", timeElement(round.committed_at, "clock")],
  ];
  const go = (number, name, label) => {
    const disabled = !(number > 0 && number <= store.roundRows().at(-1)?.number);
    const onclick = () => select(number);
    return h("button.btn.btn-s.btn-quiet", { type: "button", "aria-label": label, disabled, onclick }, icon(name));
  };
  const digest = round.weights_digest;
  const short = digest ? `${digest.slice(0, 16)}…` : format.UNKNOWN;
  const mismatch = round.digest_mismatch && "replicas have different weights after this round";
  const reason = [round.reason, mismatch].filter(Boolean).join("; ");
  const fact = (name, value, spec = "dd", more = {}) => h("div", {}, h("dt", {}, name), h(spec, more, value));
  return [
    h("div.card-head", {},
      h("h2", { id: "h-round" }, `Round ${round.number}`),
      stateBadge(round.state),
      h("span.grow"),
      h("span.nowrap", {},
        go(round.number - 1, "left", "Previous round"),
        go(round.number + 1, "right", "Next round"))),
    reason && h("p.round-reason", {}, icon("degraded"), h("span.break", {}, reason)),
    h("dl.round-facts", {},
      facts.map(([name, value]) => fact(name, value)),
      fact("Weights digest", short, "dd.mono.break", { title: digest })),
    h("div.scroll", {},
      table("table.cards", `Contributions to round ${round.number}`,
        ["Replica", "Outcome", ...GIVEN.map(([name]) => `#${name}`), "Phases", "Reason"],
        h("tbody", {}, contributions(round, store)))),
  ].filter(Boolean);
}

const GIVEN = [
  ["Base", "base_round", format.count],
  ["‖pseudo-gradient‖", "norm", format.short],
  ["Cosine", "cosine", format.short],
  ["‖outer update‖", "update_norm", format.short],
  ["Payload", "size_bytes", format.size],
  ["Up", "bytes_up", format.size],
  ["Down", "bytes_down", format.size],
  ["Requests", "requests", format.count],
];

function contributions(round, store) {
  const by = new Map(round.contributions.map((row) => [row.replica, row]));
  return store.replicaRows().map((replica) => {
    const row = by.get(replica.number);
    const { number } = replica;
    const name = h("th.nowrap", { scope: "row" },
      h("span.replica-name", {}, replicaSwatch(number), `Replica ${number}`));
    if (!row) {
      const outcome = healing(round).includes(number) ? "healing" : "missing";
      return h("tr", {}, name,
        h("td", {}, stateBadge(outcome, "state-bare")),
        h("td.muted.reason", { colspan: GIVEN.length + 2 }, WHY[outcome]));
    }
    return h("tr", {}, name,
      h("td.nowrap", {}, stateBadge(row.state, "state-bare"), row.late_s ? ` by ${format.duration(row.late_s)}` : ""),
      GIVEN.map(([label, of, text]) => h("td.num", { dataset: { label } }, text(row[of]))),
      h("td", { dataset: { label: "Phases" } }, miniPhases(row.phases)), h("td.break.reason", {}, row.reason));
  });
}

const healing = (round) => round.healing ?? [];

/** Replicas without an included contribution, by outcome, in the words of the heatmap. */
function without(round, { replicas }) {
  const parts = [];
  for (const state of ["late", "refused"]) {
    const rows = round.contributions.filter((row) => row.state === state);
    const most = Math.max(...rows.map((row) => row.late_s ?? 0));
    if (rows.length) parts.push(`${rows.length} ${state}${most > 0 ? ` by ${format.duration(most)}` : ""}`);
  }
  const numbers = new Set(round.contributions.map((row) => row.replica));
  const heal = healing(round).filter((number) => !numbers.has(number)).length;
  const missing = replicas.size - numbers.size - heal;
  if (heal) parts.push(`${heal} healing`);
  if (missing > 0 && round.committed_at) parts.push(`${missing} missing`);
  return parts.join(", ") || format.UNKNOWN;
}

function miniPhases(phases) {
  const entries = PHASES.filter((phase) => phases?.[phase] > 0).map((phase) => [phase, phases[phase]]);
  const total = entries.reduce((all, [, s]) => all + s, 0);
  if (!total) return format.UNKNOWN;
  const text = entries.map(([phase, s]) => `${phase} ${format.duration(s)}`).join(", ");
  const canvas = h("canvas", { role: "img", "aria-label": text, title: text });
  const pen = sizeCanvas(canvas, 140, 12);
  let x = 0;
  for (const [phase, s] of entries) {
    const width = (s / total) * 140;
    pen.fillStyle = phaseFill(pen, phase);
    pen.fillRect(x, 0, Math.max(width, 0.5), 12);
    x += width;
  }
  return canvas;
}

const NEWEST = 100;

/** Columns of the table of all rounds, and the text of each. */
const COLUMNS = {
  "State": null, // a badge
  "#Contributors": contributors,
  "Not included": without,
  "#Train loss": (row) => format.loss(row.loss),
  "#Eval loss": (row) => format.loss(row.eval_loss),
  "#Tokens": (row) => format.count(row.tokens_total || null),
  "#Norm": meanNorm,
  "#Traffic": ({ contributions: rows }) => bytes(rows, "bytes_up", "bytes_down"),
  "Plan": (row) => row.mode || format.UNKNOWN,
  "Straggler": late,
  "#Opened": (row) => clock(opened(row)),
  "#Committed": (row) => clock(row.committed_at),
  "Reason": (row) => row.reason,
};

function meanNorm(round) {
  const rows = round.contributions.filter((one) => one.state === "included" && one.norm !== null);
  return rows.length ? format.short(sum(rows, "norm") / rows.length) : format.UNKNOWN;
}

function makeRow({ number }, select) {
  const open = h("button.link", { type: "button", onclick: () => select(number) }, String(number));
  const row = h("tr", {}, h("th", { scope: "row" }, open), Object.keys(COLUMNS).map(cellOf));
  row.lastElementChild.classList.add("reason");
  return row;
}

function updateRow(tr, row, { store, selected }) {
  const [state, ...cells] = [...tr.cells].slice(1);
  setState(state, row.state, "state-bare");
  const [, ...texts] = Object.values(COLUMNS);
  cells.forEach((cell, i) => setText(cell, texts[i](row, store)));
  if (row.number === selected) tr.setAttribute("aria-current", "true");
  else tr.removeAttribute("aria-current");
}

export function roundsTable(context, place) {
  const { store, select } = context;
  let all = false;
  const body = h("tbody");
  const showAll = () => ((all = true), show());
  place.append(
    table("table.rounds-table.cards", "Rounds, newest first", ["Round", ...Object.keys(COLUMNS)], body),
    h("p.empty-s", { hidden: true }, "No rounds yet."),
    h("p.table-more", { hidden: true }, h("button.btn.btn-s", { type: "button", onclick: showAll })));
  const [shown, empty, more] = place.children;
  return (changed) => {
    if (!(changed.has("rounds") || (changed.has("tab") && context.page.dataset.tab === "rounds"))) return;
    show();
  };

  function show() {
    const rounds = store.roundRows().reverse();
    const rows = all ? rounds : rounds.filter((row, i) => i < NEWEST || row.number === context.selected);
    empty.hidden = rows.length > 0;
    shown.hidden = rows.length === 0;
    more.hidden = rows.length === rounds.length;
    setText(empty, RUN_ENDED.has(store.run?.state) ? "No rounds." : "No rounds yet.");
    setText(more.firstElementChild, `Show all ${rounds.length} rounds`);
    if (context.page.dataset.tab !== "rounds") return;
    keyed(body, rows, (row) => row.number,
      (row) => makeRow(row, select),
      (tr, row) => updateRow(tr, row, context));
  }
}
