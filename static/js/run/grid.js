// Outcomes by round and replica: those of the store, and those before it, asked for once and packed.

import { getJSON } from "../lib/live.js";

/** From nothing special to worst: where several share a pixel, the highest is shown. */
export const OUTCOMES = ["open", "included", "uploaded", "healing", "missing", "late", "void", "refused"];
/** Of those that gave nothing to a round. */
export const WHY = { healing: "it was catching up", missing: "no contribution" };
const CODE = Object.fromEntries(OUTCOMES.map((outcome, code) => [outcome, code]));
const OPEN = new Set(["collecting", "planned"]);

export class RoundGrid {
  replicas = [];
  #older = { numbers: [], states: [], codes: new Uint8Array(0), size: 0, given: [], late: new Map() };
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
    while (this.#older.numbers.length && this.#older.numbers.at(-1) >= first) this.#older.numbers.pop();
  }

  async #ask(below) {
    this.#asked = true;
    try {
      const { numbers, states, kinds, replicas, names, outcomes, late, late_ds } = await getJSON(`${this.address}?below=${below}`);
      let number = 0;
      let place = 0;
      const found = { late: new Map(late.map((step, i) => [(place += step), late_ds[i] / 10])), numbers: numbers.map((step) => (number += step)), states: [...states].map((i) => kinds[i]), size: replicas, codes: new Uint8Array(outcomes.length), given: [] };
      for (let i = 0; i < found.numbers.length; i++) {
        let given = 0;
        for (let k = 0; k < replicas; k++) {
          const name = names[outcomes.charCodeAt(i * replicas + k) - 48];
          found.codes[i * replicas + k] = code(name, found.states[i]);
          if (name === "included") given += 1;
        }
        found.given.push(given);
      }
      this.#older = found;
      for (const listener of this.#listeners) listener();
    } catch {
      this.#asked = false; // the connection's dot says how it is
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

  /** Place in OUTCOMES of the k-th replica in the i-th round. */
  code(i, k) {
    if (i < 0) return CODE.open; // before the first that is known
    const older = this.#older.numbers.length;
    if (i < older) {
      const replica = this.replicas[k];
      return replica < this.#older.size ? this.#older.codes[i * this.#older.size + replica] : CODE.missing;
    }
    const round = this.#recent[i - older];
    return round ? this.#of(round)[k] ?? CODE.missing : CODE.open;
  }

  /** By how many seconds it was late; nothing if it was not, or nobody knows. */
  late(i, k) {
    const older = this.#older.numbers.length;
    if (i < older) return this.#older.late.get(i * this.#older.size + this.replicas[k]);
    return this.#recent[i - older]?.contributions.find((c) => c.replica === this.replicas[k])?.late_s;
  }

  /** How many contributions the i-th round has taken in. */
  given(i) {
    const older = this.#older.numbers.length;
    if (i < older) return this.#older.given[i];
    return this.#recent[i - older]?.contributions.filter((c) => c.state === "included").length ?? 0;
  }

  #of(round) {
    let codes = this.#codes.get(round);
    if (codes?.length === this.replicas.length) return codes;
    const by = new Map([...(round.healing ?? []).map((r) => [r, "healing"]), ...round.contributions.map((c) => [c.replica, c.state])]);
    codes = Uint8Array.from(this.replicas, (replica) => code(by.get(replica), round.state));
    this.#codes.set(round, codes);
    return codes;
  }
}

function code(outcome, state) {
  if (outcome === "refused") return CODE.refused;
  if (state === "void") return CODE.void;
  return outcome ? CODE[outcome] : OPEN.has(state) ? CODE.open : CODE.missing;
}
