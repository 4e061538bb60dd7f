// Everything the run page knows, in one place. A snapshot fills it, deltas (by stream or by
// polling) are merged in, and whoever draws is told which parts have changed.
//
// A delta may repeat what is here already: rounds and replicas are told by their number, events by
// their id, points by their step (of the run's own series: by their round). One key has one value.

const COLUMNS = ["step", "round", "tokens", "wall_s", "value"];

export const seriesKey = (series, replica) => `${series}/${replica ?? ""}`;

export class RunStore {
  run = null;
  pools = new Map();
  replicas = new Map();
  rounds = new Map();
  events = new Map();
  series = new Map();
  cursor = "";
  #listeners = [];

  /** `listener(changed: Set)` with any of run, pools, replicas, rounds, events, points. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  load(snapshot) {
    this.run = snapshot.run;
    this.cursor = snapshot.cursor;
    this.pools = new Map(snapshot.pools.map((row) => [row.id, row]));
    this.replicas = new Map(snapshot.replicas.map((row) => [row.number, row]));
    this.rounds = new Map(snapshot.rounds.map((row) => [row.number, row]));
    this.events = new Map(snapshot.events.map((row) => [row.id, row]));
    for (const columns of snapshot.points) {
      const mine = this.series.get(seriesKey(columns.series, columns.replica));
      // A snapshot is thinned; a series that was asked for in full only needs what is new.
      if (mine?.full) this.#merge(tail(columns, mine[keyOf(mine)].at(-1)));
      else this.series.set(seriesKey(columns.series, columns.replica), columns);
    }
    this.#tell(new Set(["run", "pools", "replicas", "rounds", "events", "points"]));
  }

  apply(delta, id = "") {
    if (id) this.cursor = id;
    if (!this.run) return;
    const changed = new Set();
    if (delta.run) {
      this.run = { ...this.run, ...delta.run };
      changed.add("run");
    }
    for (const [part, key] of [["pools", "id"], ["replicas", "number"], ["rounds", "number"], ["events", "id"]]) {
      for (const row of delta[part] ?? []) {
        this[part].set(row[key], row);
        changed.add(part);
      }
    }
    for (const columns of delta.points ?? []) {
      if (!columns.value.length) continue;
      this.#merge(columns);
      changed.add("points");
    }
    if (changed.size) this.#tell(changed);
  }

  /** A series the server was asked for by itself. What came meanwhile is kept. */
  replace(columns) {
    const name = seriesKey(columns.series, columns.replica);
    const before = this.series.get(name);
    this.series.set(name, { ...columns, full: true });
    if (before && columns.value.length) this.#merge(tail(before, columns[keyOf(columns)].at(-1)));
    this.#tell(new Set(["points"]));
  }

  #merge(columns) {
    const name = seriesKey(columns.series, columns.replica);
    const mine = this.series.get(name);
    if (!mine) {
      this.series.set(name, { ...columns, ...Object.fromEntries(COLUMNS.map((c) => [c, [...columns[c]]])) });
      return;
    }
    const by = keyOf(mine);
    for (let i = 0; i < columns.value.length; i++) {
      const place = search(mine[by], columns[by][i]);
      const replace = mine[by][place] === columns[by][i] ? 1 : 0;
      for (const c of COLUMNS) mine[c].splice(place, replace, columns[c][i]);
    }
    mine.total = Math.max(mine.total ?? 0, mine.value.length);
  }

  #tell(changed) {
    for (const listener of this.#listeners) listener(changed);
  }

  replicaRows() {
    return [...this.replicas.values()].sort((a, b) => a.number - b.number);
  }

  /** In the order in which they were made. */
  poolRows() {
    return [...this.pools.values()].sort((a, b) => a.id - b.id);
  }

  roundRows() {
    return [...this.rounds.values()].sort((a, b) => a.number - b.number);
  }

  /** Newest first. */
  eventRows() {
    return [...this.events.values()].sort((a, b) => b.id - a.id);
  }
}

const keyOf = (columns) => (columns.replica === null ? "round" : "step");

/** The points after `key`. */
function tail(columns, key) {
  const from = search(columns[keyOf(columns)], key + 1);
  return { ...columns, ...Object.fromEntries(COLUMNS.map((c) => [c, columns[c].slice(from)])) };
}

/** Where `value` is or belongs in a sorted list; the end is tried first, as data is appended. */
export function search(sorted, value) {
  let high = sorted.length;
  if (!high || sorted[high - 1] < value) return high;
  let low = 0;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
