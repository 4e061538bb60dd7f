// One round in detail, and the table of all rounds.

import * as format from "../lib/format.js";
import { h, icon, keyed, setText, stateBadge, table } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";
import { WHY } from "./grid.js";
import { PHASES, phaseFill, replicaSwatch, sizeCanvas } from "../lib/palette.js";

const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);

export function roundDetail(context, card) {
  const { store } = context;
  let shown = "";
  const older = new Map(); // rounds that the snapshot left out, by number; null: asked for
  async function ask(number) {
    older.set(number, null);
    try {
      older.set(number, (await getJSON(context.page.dataset.round.replace("/0.json", `/${number}.json`))).round);
      show();
    } catch {
      older.delete(number); // there is none, or the connection's dot says how it is
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

/** Who was waited for: of those whose part was taken, the one that waited least itself. Each one's own
 * clock measured that, so no two are compared. `lag`: how much longer the typical one waited. */
function straggler(round) {
  const waits = round.contributions.filter((row) => row.state === "included" && row.phases?.compute).map((row) => [row.phases.wait ?? 0, row.replica]).sort((a, b) => a[0] - b[0]);
  if (waits.length < 2) return null;
  return { replica: waits[0][1], lag: waits[waits.length >> 1][0] - waits[0][0] };
}

const late = (round, one = straggler(round)) => (one ? `replica ${one.replica}, ${format.duration(one.lag)}` : format.UNKNOWN);

const opened = (round) => {
  const begun = round.contributions.map((row) => Date.parse(row.started_at)).filter(Number.isFinite);
  return begun.length ? format.clock(new Date(Math.min(...begun)).toISOString()) : format.UNKNOWN;
};

function detail(round, { store, select, page }) {
  const rows = round.contributions;
  const committed = rows.map((row) => Date.parse(row.committed_at)).filter(Number.isFinite);
  const begun = rows.map((row) => Date.parse(row.started_at)).filter(Number.isFinite);
  const took = committed.length && begun.length ? (Math.max(...committed) - Math.min(...begun)) / 1000 : null;
  const facts = [
    ...("fragments" in page.dataset ? [["Fragment", `${round.fragment} (0 to ${page.dataset.fragments - 1})`]] : []),
    ["Contributors", `${round.contributors} of ${store.run.target}`],
    ["Plan", round.mode || format.UNKNOWN],
    ["Straggler and its lag", late(round)],
    ["Outer learning rate", page.dataset.outerLr],
    ["Training loss", format.loss(round.loss)],
    ["Evaluation loss", format.loss(round.eval_loss)],
    ["Took", format.duration(took)],
    ["Moved", `${format.size(sum(rows, "bytes_up"))} up, ${format.size(sum(rows, "bytes_down"))} down`],
    ["Tokens so far", format.count(round.tokens_total || null)],
    ["Opened", opened(round)],
    ["Committed", round.committed_at ? format.clock(round.committed_at) : format.UNKNOWN],
  ];
  const go = (number, name, text) => {
    const there = number > 0 && number <= store.roundRows().at(-1)?.number;
    return h("button.btn.btn-s.btn-quiet", { type: "button", "aria-label": text, disabled: !there, onclick: () => select(number) }, icon(name));
  };
  return [
    h("div.card-head", {}, h("h2", { id: "h-round" }, `Round ${round.number}`), stateBadge(round.state),
      h("span.grow"), h("span.nowrap", {}, go(round.number - 1, "left", "Round before"), go(round.number + 1, "right", "Round after"))),
    round.reason || round.digest_mismatch
      ? h("p.round-reason", {}, icon("degraded"), h("span.break", {}, [round.reason, round.digest_mismatch ? "replicas disagree about the weights after this round" : ""].filter(Boolean).join("; ")))
      : null,
    h("dl.round-facts", {},
      ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
      h("div", {}, h("dt", {}, "Weights digest"), h("dd.mono.break", { title: round.weights_digest }, round.weights_digest ? round.weights_digest.slice(0, 16) + "…" : format.UNKNOWN))),
    h("div.scroll", {},
      table("table.cards", `Contributions to round ${round.number}`,
        ["Replica", "Outcome", ...GIVEN.map(([name]) => `#${name}`), "Phases", "Why"],
        h("tbody", {}, contributions(round, store)))),
  ].filter(Boolean);
}

const GIVEN = [
  ["Base", "base_round", format.count], ["‖pseudo-gradient‖", "norm", format.short], ["Cosine", "cosine", format.short], ["‖outer update‖", "update_norm", format.short], ["Payload", "size_bytes", format.size],
  ["Up", "bytes_up", format.size], ["Down", "bytes_down", format.size], ["Requests", "requests", format.count],
];

function contributions(round, store) {
  const by = new Map(round.contributions.map((row) => [row.replica, row]));
  return store.replicaRows().map((replica) => {
    const row = by.get(replica.number);
    const name = h("th.nowrap", { scope: "row" }, h("span.replica-name", {}, replicaSwatch(replica.number), `Replica ${replica.number}`));
    if (!row) {
      const outcome = healing(round).includes(replica.number) ? "healing" : "missing";
      return h("tr", {}, name, h("td", {}, stateBadge(outcome, "state-bare")), h("td.muted.reason", { colspan: GIVEN.length + 2 }, WHY[outcome]));
    }
    return h("tr", {}, name,
      h("td.nowrap", {}, stateBadge(row.state, "state-bare"), row.late_s ? ` by ${format.duration(row.late_s)}` : ""),
      GIVEN.map(([label, of, text]) => h("td.num", { dataset: { label } }, text(row[of]))),
      h("td", { dataset: { label: "Phases" } }, miniPhases(row.phases)), h("td.break.reason", {}, row.reason));
  });
}

const healing = (round) => round.healing ?? [];

/** Who gave nothing that was taken, by outcome, in the words of the heatmap. */
function without(round, { replicas }) {
  const told = [];
  for (const state of ["late", "refused"]) {
    const rows = round.contributions.filter((row) => row.state === state);
    const most = Math.max(...rows.map((row) => row.late_s ?? 0));
    if (rows.length) told.push(`${rows.length} ${state}${most > 0 ? ` by ${format.duration(most)}` : ""}`);
  }
  const numbers = new Set(round.contributions.map((row) => row.replica));
  const heal = healing(round).filter((number) => !numbers.has(number)).length;
  const missing = replicas.size - numbers.size - heal;
  if (heal) told.push(`${heal} healing`);
  if (missing > 0 && round.committed_at) told.push(`${missing} missing`);
  return told.join(", ") || format.UNKNOWN;
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
const COLUMNS = ["State", "#Contributors", "Without", "#Train loss", "#Eval loss", "#Tokens", "#Norm", "#Moved", "Plan", "Straggler", "#Opened", "#Committed", "Why"];

export function roundsTable(context, place) {
  const { store, select } = context;
  let all = false;
  const body = h("tbody");
  place.append(
    table("table.rounds-table.cards", "Rounds, newest first", ["Round", ...COLUMNS], body),
    h("p.empty-s", { hidden: true }, "No round has begun yet."),
    h("p.table-more", { hidden: true }, h("button.btn.btn-s", { type: "button", onclick: () => ((all = true), show()) })));
  const [shown, empty, more] = place.children;
  return (changed) => {
    if (!(changed.has("rounds") || (changed.has("tab") && context.page.dataset.tab === "rounds"))) return;
    show();
  };

  function show() {
    const found = store.roundRows().reverse();
    const rows = all ? found : found.filter((row, i) => i < NEWEST || row.number === context.selected);
    empty.hidden = rows.length > 0;
    shown.hidden = rows.length === 0;
    more.hidden = rows.length === found.length;
    setText(more.firstElementChild, `Show all ${found.length} rounds`);
    if (context.page.dataset.tab !== "rounds") return;
    keyed(body, rows, (row) => row.number, (row) =>
      h("tr", {},
        h("th", { scope: "row" }, h("button.link", { type: "button", onclick: () => select(row.number) }, String(row.number))),
        ...COLUMNS.map((one) => h(one[0] === "#" ? "td.num" : one === "Why" ? "td.reason" : "td", { dataset: { label: one.replace("#", "") } }))),
    (tr, row) => {
      const [, state, contributors, missed, loss, evaluation, tokens, norm, moved, plan, last, begun, committed, reason] = tr.children;
      const norms = row.contributions.filter((one) => one.state === "included" && one.norm !== null);
      if (state.firstElementChild?.dataset.state !== row.state) state.replaceChildren(stateBadge(row.state, "state-bare"));
      setText(contributors, `${row.contributors} of ${store.run.target}`);
      setText(missed, without(row, store));
      setText(loss, format.loss(row.loss));
      setText(evaluation, format.loss(row.eval_loss));
      setText(tokens, format.count(row.tokens_total || null));
      setText(moved, format.size(sum(row.contributions, "bytes_up") + sum(row.contributions, "bytes_down")));
      setText(norm, norms.length ? format.short(sum(norms, "norm") / norms.length) : format.UNKNOWN);
      setText(plan, row.mode || format.UNKNOWN);
      setText(last, late(row));
      setText(begun, opened(row));
      setText(committed, row.committed_at ? format.clock(row.committed_at) : format.UNKNOWN);
      setText(reason, row.reason);
      if (row.number === context.selected) tr.setAttribute("aria-current", "true");
      else tr.removeAttribute("aria-current");
    });
  }
}
