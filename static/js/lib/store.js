// Everything the run page knows, in one place. A snapshot fills it, deltas (by stream or by
// polling) are merged in, and whoever draws is told which parts have changed.
//
// A delta may repeat what is here already: rounds and replicas are told by their number, events by
// their id. Points are not kept: the charts ask for windows of them, and take what comes meanwhile
// from `fresh`.

export class RunStore {
  run = null;
  pools = new Map();
  replicas = new Map();
  rounds = new Map();
  events = new Map();
  /** Columns of the delta that is being told of; null: a snapshot, so anything may be new. */
  fresh = null;
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
    this.fresh = null;
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
    this.fresh = (delta.points ?? []).filter((columns) => columns.value.length);
    if (this.fresh.length) changed.add("points");
    if (changed.size) this.#tell(changed);
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
