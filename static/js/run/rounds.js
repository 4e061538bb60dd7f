// One round in detail, and the table of all rounds.

import * as format from "../lib/format.js";
import { cellOf, h, icon, keyed, setState, setText, stateBadge, table } from "../lib/dom.js";
import { getJSON, NotFound } from "../lib/live.js";
import { RUN_ENDED } from "../lib/states.js";
import { timeElement } from "../lib/times.js";
import { WHY, withOutcome } from "./grid.js";
import { PHASES, phaseFill, replicaSwatch, sizeCanvas } from "../lib/palette.js";

const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
/** Bytes of all contributions. Telemetry reports them later than the round: until then, unknown. */
const bytes = (rows, ...names) =>
  format.size(names.reduce((total, name) => total + sum(rows, name), 0) || null);

export function roundDetail(context, card) {
  const { store } = context;
  let round = null; // the round in the card, with its contributions
  let loaded = ""; // what was requested: the round as the store had it
  async function ask(number) {
    const wanted = JSON.stringify([number, store.rounds.get(number)]);
    if (wanted === loaded) return;
    loaded = wanted;
    try {
      const answer = await getJSON(
        context.page.dataset.round.replace("/0.json", `/${number}.json`),
      );
      if (loaded !== wanted) return;
      round = answer.round;
      show();
    } catch (error) {
      if (loaded !== wanted) return;
      if (error instanceof NotFound) return explain(number);
      loaded = ""; // the connection indicator shows the state
    }
  }
  function explain(number) {
    card.replaceChildren(
      h("h2", { id: "h-round" }, `Round ${number}`),
      h("p.empty-s", {}, `This run has no round ${number}.`),
    );
  }
  function show() {
    const number = context.selected;
    if (number && round?.number === number)
      card.replaceChildren(...detail(round, store.rounds.get(number), context));
    if (number && store.run) ask(number);
  }
  return (changed) => changed.has("rounds") && show();
}

/** The replica that waited least for the others, and how much longer the typical one waited. */
const late = ({ straggler, lag_s }) =>
  straggler === null ? format.UNKNOWN : `replica ${straggler}, ${format.duration(lag_s)}`;

/** The known times `name` of the contributions. */
const times = (round, name) =>
  round.contributions.map((row) => Date.parse(row[name])).filter(Number.isFinite);

/** How many replicas contributed; before the plan, how many have uploaded. */
function contributors(round, { run }) {
  if (round.state !== "collecting") return `${round.contributors} of ${run.target}`;
  return `${withOutcome(round, "uploaded").length} of ${run.target} uploaded`;
}

const clock = (time) => format.clock(time, { seconds: true });

/** `summary`: the row of the list; null for a round that is not in it. */
function detail(round, summary, { store, select, page }) {
  const rows = round.contributions;
  const opened = times(round, "started_at").sort((a, b) => a - b)[0] ?? NaN;
  const took_ms = Math.max(...times(round, "committed_at")) - opened;
  const facts = [
    ...("fragments" in page.dataset
      ? [["Fragment", `${round.fragment} (0 to ${page.dataset.fragments - 1})`]]
      : []),
    [
      "Contributors",
      summary ? contributors(summary, store) : `${round.contributors} of ${store.run.target}`,
    ],
    ["Plan", round.mode || format.UNKNOWN],
    ["Straggler and lag", summary ? late(summary) : format.UNKNOWN],
    ["Outer learning rate", page.dataset.outerLr],
    ["Training loss", format.loss(round.loss)],
    ["Evaluation loss", format.loss(round.eval_loss)],
    ["Duration", format.duration(took_ms / 1000)],
    ["Traffic", `${bytes(rows, "bytes_up")} up, ${bytes(rows, "bytes_down")} down`],
    ["Tokens so far", format.count(round.tokens_total || null)],
    ["Opened", timeElement(opened, "clock")],
    ["Committed", timeElement(round.committed_at, "clock")],
  ];
  const go = (number, name, label) => {
    const disabled = !(number > 0 && number <= store.roundRows().at(-1)?.number);
    const onclick = () => select(number);
    return h(
      "button.btn.btn-s.btn-quiet",
      { type: "button", "aria-label": label, disabled, onclick },
      icon(name),
    );
  };
  const digest = round.weights_digest;
  const short = digest ? `${digest.slice(0, 16)}…` : format.UNKNOWN;
  const mismatch = round.digest_mismatch && "replicas have different weights after this round";
  const reason = [round.reason, mismatch].filter(Boolean).join("; ");
  const fact = (name, value, spec = "dd", more = {}) =>
    h("div", {}, h("dt", {}, name), h(spec, more, value));
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
    h("div.scroll", { tabindex: 0, role: "group", "aria-label": "Contributions" },
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
    return h(
      "tr",
      {},
      name,
      h(
        "td.nowrap",
        {},
        stateBadge(row.state, "state-bare"),
        row.late_s ? ` by ${format.duration(row.late_s)}` : "",
      ),
      GIVEN.map(([label, of, text]) => h("td.num", { dataset: { label } }, text(row[of]))),
      h("td", { dataset: { label: "Phases" } }, miniPhases(row.phases)),
      h("td.break.reason", {}, row.reason),
    );
  });
}

const healing = (round) => round.healing ?? [];

const NOT_INCLUDED = ["late", "refused", "healing"];

/** Replicas without an included contribution, by outcome, in the words of the heatmap. */
function without(round, { replicas }) {
  const parts = [];
  const most = Math.max(0, ...Object.values(round.late));
  const counted = Object.fromEntries(
    NOT_INCLUDED.map((outcome) => [outcome, withOutcome(round, outcome).length]),
  );
  for (const [outcome, count] of Object.entries(counted)) {
    const by = outcome === "late" && most > 0 ? ` by ${format.duration(most)}` : "";
    if (count) parts.push(`${count} ${outcome}${by}`);
  }
  const known = [...round.outcomes].filter((digit) => digit !== "0").length;
  const missing = replicas.size - known;
  if (missing > 0 && round.committed_at) parts.push(`${missing} missing`);
  return parts.join(", ") || format.UNKNOWN;
}

function miniPhases(phases) {
  const entries = PHASES.filter((phase) => phases?.[phase] > 0).map((phase) => [
    phase,
    phases[phase],
  ]);
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
  "#Norm": (row) => format.short(row.norm),
  "#Traffic": (row) => format.size(row.bytes || null),
  "Plan": (row) => row.mode || format.UNKNOWN,
  "Straggler": late,
  "#Opened": (row) => clock(row.opened_at),
  "#Committed": (row) => clock(row.committed_at),
  "Reason": (row) => row.reason,
};

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
  let shownRows = NEWEST;
  let first = false; // the oldest round is loaded
  const body = h("tbody");
  async function showMore() {
    const oldest = store.roundRows()[0]?.number ?? 0;
    if (store.rounds.size < shownRows + NEWEST && !first) {
      try {
        const { rounds } = await getJSON(`${context.page.dataset.rounds}?below=${oldest}`);
        first = !rounds.length;
        store.addRounds(rounds);
      } catch {
        return; // the connection indicator shows the state
      }
    }
    shownRows += NEWEST;
    show();
  }
  place.append(
    table(
      "table.rounds-table.cards",
      "Rounds, newest first",
      ["Round", ...Object.keys(COLUMNS)],
      body,
    ),
    h("p.empty-s", { hidden: true }, "No rounds yet."),
    h(
      "p.table-more",
      { hidden: true },
      h("button.btn.btn-s", { type: "button", onclick: showMore }),
    ),
  );
  const [shown, empty, more] = place.children;
  shown.hidden = true; // its columns have no width yet
  return (changed) => {
    if (!(changed.has("rounds") || (changed.has("tab") && context.page.dataset.tab === "rounds")))
      return;
    show();
  };

  function show() {
    const rounds = store.roundRows().reverse();
    const rows = rounds.filter((row, i) => i < shownRows || row.number === context.selected);
    empty.hidden = rows.length > 0;
    shown.hidden = rows.length === 0;
    more.hidden =
      rows.length === rounds.length && (first || !rounds.length || rounds.at(-1).number <= 1);
    setText(empty, RUN_ENDED.has(store.run?.state) ? "No rounds." : "No rounds yet.");
    setText(more.firstElementChild, "Show older rounds");
    if (context.page.dataset.tab !== "rounds") return;
    keyed(body, rows, (row) => row.number,
      (row) => makeRow(row, select),
      (tr, row) => updateRow(tr, row, context));
  }
}
