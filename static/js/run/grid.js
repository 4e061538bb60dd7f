// Outcomes by round and replica: from the store, and older ones fetched once in packed form.

import { getLater } from "../lib/live.js";

/** From normal to worst: a pixel that covers several cells shows the worst. */
export const OUTCOMES = [
  "open",
  "included",
  "uploaded",
  "healing",
  "missing",
  "late",
  "void",
  "refused",
];
/** Reasons of a replica without a contribution. */
export const WHY = { healing: "catching up", missing: "no contribution" };
const CODE = Object.fromEntries(OUTCOMES.map((outcome, code) => [outcome, code]));
const OPEN = new Set(["collecting", "planned"]);

export class RoundGrid {
  replicas = [];
  #older = {
    numbers: [],
    states: [],
    codes: new Uint8Array(0),
    size: 0,
    given: [],
    at: [],
    tokens: [],
    late: new Map(),
  };
  #recent = [];
  #codes = new WeakMap(); // a round of the store -> its codes
  #asked = false;
  #listeners = [];

  constructor(store, address) {
    Object.assign(this, { store, address });
  }

  listen(listener) {
    this.#listeners.push(listener);
  }

  update() {
    this.replicas = this.store.replicaRows().map((row) => row.number);
    this.#recent = this.store.roundRows();
    const first = this.#recent[0]?.number ?? 1;
    if (first > 1 && !this.#asked) this.#ask(first);
    while (this.#older.numbers.length && this.#older.numbers.at(-1) >= first)
      this.#older.numbers.pop();
  }

  async #ask(below) {
    this.#asked = true;
    try {
      const answer = await getLater(`${this.address}?below=${below}`);
      const { replicas, names, outcomes } = answer;
      let number = 0;
      let place = 0;
      const batch = {
        numbers: answer.numbers.map((step) => (number += step)),
        states: [...answer.states].map((i) => answer.kinds[i]),
        codes: new Uint8Array(outcomes.length),
        size: replicas,
        given: [],
        at: cumulative(answer.at_ds).map((value) => value / 10),
        tokens: cumulative(answer.tokens),
        late: new Map(answer.late.map((step, i) => [(place += step), answer.late_ds[i] / 10])),
      };
      for (let i = 0; i < batch.numbers.length; i++) {
        let given = 0;
        for (let k = 0; k < replicas; k++) {
          const name = names[outcomes.charCodeAt(i * replicas + k) - 48];
          batch.codes[i * replicas + k] = code(name, batch.states[i]);
          if (name === "included") given += 1;
        }
        batch.given.push(given);
      }
      this.#older = batch;
      for (const listener of this.#listeners) listener();
    } catch {
      this.#asked = false; // the connection indicator shows the state
    }
  }

  get count() {
    return this.#older.numbers.length + this.#recent.length;
  }

  number(i) {
    const older = this.#older.numbers.length;
    if (i < older) return this.#older.numbers[i];
    const last = this.#recent.length - 1;
    return this.#recent[i - older]?.number ?? (this.#recent[last]?.number ?? 0) + i - older - last;
  }

  /** When round i was committed (Unix seconds); null if it is not. */
  at(i) {
    const older = this.#older.numbers.length;
    if (i < older) return this.#older.at[i] || null;
    const time = Date.parse(this.#recent[i - older]?.committed_at);
    return Number.isFinite(time) ? time / 1000 : null;
  }

  /** Tokens of the run after round i; null if unknown. */
  tokens(i) {
    const older = this.#older.numbers.length;
    return (i < older ? this.#older.tokens[i] : this.#recent[i - older]?.tokens_total) || null;
  }

  /** Index in OUTCOMES for replica k in round i. */
  code(i, k) {
    if (i < 0) return CODE.open; // before the first known round
    const older = this.#older.numbers.length;
    if (i < older) {
      const replica = this.replicas[k];
      return replica < this.#older.size
        ? this.#older.codes[i * this.#older.size + replica]
        : CODE.missing;
    }
    const round = this.#recent[i - older];
    return round ? this.#of(round)[k] ?? CODE.missing : CODE.open;
  }

  /** Seconds it was late; undefined if it was in time or the delay is unknown. */
  late(i, k) {
    const older = this.#older.numbers.length;
    if (i < older) return this.#older.late.get(i * this.#older.size + this.replicas[k]);
    return this.#recent[i - older]?.late[this.replicas[k]];
  }

  /** Number of contributions included in round i. */
  given(i) {
    const older = this.#older.numbers.length;
    if (i < older) return this.#older.given[i];
    return this.#recent[i - older] ? included(this.#recent[i - older]) : 0;
  }

  #of(round) {
    let codes = this.#codes.get(round);
    if (codes?.length === this.replicas.length) return codes;
    codes = Uint8Array.from(this.replicas, (replica) =>
      code(outcomeOf(round, replica), round.state),
    );
    this.#codes.set(round, codes);
    return codes;
  }
}

/** The names of the digits in `outcomes` of a round. */
const DIGITS = ["", "uploaded", "included", "late", "refused", "healing"];
const INCLUDED = String(DIGITS.indexOf("included"));

/** The outcome of a replica in a round; "" if it has not contributed. */
export const outcomeOf = (round, replica) => DIGITS[round.outcomes[replica]] ?? "";

/** Numbers of the replicas with that outcome. */
export const withOutcome = (round, outcome) => {
  const digit = String(DIGITS.indexOf(outcome));
  return [...round.outcomes].flatMap((one, replica) => (one === digit ? [replica] : []));
};

/** Values from their differences. */
function cumulative(steps) {
  let value = 0;
  return steps.map((step) => (value += step));
}

function included({ outcomes }) {
  let count = 0;
  for (const digit of outcomes) if (digit === INCLUDED) count += 1;
  return count;
}

function code(outcome, state) {
  if (outcome === "refused") return CODE.refused;
  if (state === "void") return CODE.void;
  return outcome ? CODE[outcome] : OPEN.has(state) ? CODE.open : CODE.missing;
}
