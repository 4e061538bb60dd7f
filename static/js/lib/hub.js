// One stream for all tabs of this browser: HTTP/1.1 allows six connections to a server, so that
// with a stream each the seventh tab would never load.
//
// A Web Lock chooses the tab that leads: it holds the stream, which follows what all tabs show, and
// repeats on a BroadcastChannel what comes. When it goes, the lock passes to another, which asks
// the others where they are; each tab skips what it has had already. A tab that hears nothing for
// long (the leader was frozen) takes the lead by force. Without locks (a page that came over plain
// HTTP from another machine) each tab holds a stream of its own.

const NAME = "archipelago-live";
const BEAT_MS = 15_000; // of the server
const GATHER_MS = 150; // how long a new leader waits for the others to say what they show
const AGAIN_MS = 5000;

const shareable = () => Boolean(navigator.locks && window.BroadcastChannel);

/** Whether stream id `a` comes after `b`; '' comes before all. */
export function newer(a, b) {
  if (!a || !b) return Boolean(a);
  const [ams, an = 0] = a.split("-").map(Number);
  const [bms, bn = 0] = b.split("-").map(Number);
  return ams === bms ? an > bn : ams > bms;
}

/** What a page's own stream follows, and the address under which several can be had. */
export function parts(address) {
  const url = new URL(address, location.href);
  const run = /runs\/([0-9a-f-]{36})\/stream$/.exec(url.pathname);
  return {
    topic: run ? run[1] : "list",
    after: url.searchParams.get("after") ?? "",
    shared: run ? url.pathname.slice(0, run.index) + "stream" : url.pathname,
  };
}

export class Hub {
  #tab = Math.random().toString(36).slice(2);
  #channel = null;
  #opened = null;
  #waiting = null; // for the lock
  #release = null;
  #leading = false;
  #covered = false; // whether the leader's stream follows what this tab shows
  #heard = 0;
  #timers = {};
  // The leader's:
  #source = null;
  #members = new Map(); // tab -> { topic, after, since }
  #status = {};

  /** `address()` of this page's own stream; `on(message)` gets `delta`, `resync`, `beat` and
   *  `status` ({open, feed, silent}: whether the stream is there, the server's own feed, and since
   *  when no worker is at work). */
  constructor({ address, on }) {
    Object.assign(this, { address, on });
  }

  open() {
    this.close();
    this.#heard = Date.now();
    this.#timers.watch = setInterval(() => this.#watch(), BEAT_MS);
    if (!shareable()) {
      this.#lead();
      return;
    }
    this.#channel = new BroadcastChannel(NAME);
    this.#channel.onmessage = (event) => this.#hear(event.data);
    this.#queue({});
    this.#live();
    this.#hello();
  }

  close() {
    for (const timer of Object.values(this.#timers)) clearTimeout(timer); // intervals as well
    this.#timers = {};
    this.#stepDown();
    this.#waiting?.abort();
    this.#waiting = null;
    this.#opened?.abort();
    this.#channel?.postMessage({ kind: "bye", tab: this.#tab });
    this.#channel?.close();
    this.#channel = null;
  }

  // Who leads.

  /** A lock of its own tells that a tab is there, however it goes. */
  #live() {
    this.#opened = new AbortController();
    const { signal } = this.#opened;
    navigator.locks.request(`${NAME}:${this.#tab}`, { ifAvailable: true }, () => {
      return new Promise((resolve) => signal.addEventListener("abort", resolve));
    });
  }

  #queue(options) {
    this.#waiting?.abort();
    const waiting = new AbortController();
    this.#waiting = waiting;
    const how = options.steal ? options : { ...options, signal: waiting.signal };
    navigator.locks
      .request(NAME, how, () => {
        if (waiting.signal.aborted) return null;
        this.#lead();
        return new Promise((resolve) => (this.#release = resolve));
      })
      .catch(() => {
        if (this.#waiting !== waiting || waiting.signal.aborted) return;
        this.#stepDown(); // another took the lead by force
        this.#queue({});
      });
  }

  #lead() {
    this.#leading = true;
    this.#covered = false;
    this.#members.clear();
    this.#status = { kind: "status", open: false, feed: true, tabs: [] };
    this.#join(this.#tab, parts(this.address()));
    this.#channel?.postMessage({ kind: "who" });
  }

  #stepDown() {
    this.#leading = false;
    this.#source?.close();
    this.#source = null;
    this.#release?.();
    this.#release = null;
  }

  #hello() {
    const { topic, after } = parts(this.address());
    this.#channel?.postMessage({ kind: "hello", tab: this.#tab, topic, after });
  }

  #hear(message) {
    if (message.kind === "who") {
      this.#covered = false;
      this.#hello();
    } else if (message.kind === "hello") this.#leading && this.#join(message.tab, message);
    else if (message.kind === "bye") this.#leading && this.#leave(message.tab);
    else if (!this.#leading) {
      this.#heard = Date.now();
      this.#pass(message);
    }
  }

  /** A leader whose connection has died unseen opens another; a tab whose leader has, leads. */
  #watch() {
    if (this.#leading) this.#prune();
    if (Date.now() - this.#heard < 3 * BEAT_MS) return;
    this.#heard = Date.now();
    if (this.#leading) this.#connect();
    else if (this.#channel) this.#queue({ steal: true });
  }

  // The leader's.

  #join(tab, { topic, after }) {
    this.#members.set(tab, { topic, after, since: Date.now() });
    this.#soon(GATHER_MS);
  }

  async #prune() {
    if (!this.#channel) return;
    const { held } = await navigator.locks.query();
    const there = new Set(held.map((lock) => lock.name));
    for (const [tab, { since }] of this.#members) {
      if (Date.now() - since > BEAT_MS && tab !== this.#tab && !there.has(`${NAME}:${tab}`)) this.#leave(tab);
    }
  }

  #leave(tab) {
    const gone = this.#members.get(tab);
    this.#members.delete(tab);
    if (gone && ![...this.#members.values()].some((one) => one.topic === gone.topic)) this.#soon(1000);
  }

  #soon(ms) {
    clearTimeout(this.#timers.connect);
    this.#timers.connect = setTimeout(() => this.#connect(), ms);
  }

  #connect() {
    if (!this.#leading) return;
    this.#source?.close();
    const topics = new Map();
    for (const { topic, after } of this.#members.values()) {
      if (!topics.has(topic) || newer(topics.get(topic), after)) topics.set(topic, after);
    }
    const { shared } = parts(this.address());
    const query = new URLSearchParams([...topics].map(([topic, after]) => ["topic", `${topic}:${after}`]));
    const source = new EventSource(`${shared}?${query}`);
    this.#source = source;
    const tabs = [...this.#members.keys()];
    source.onopen = () => this.#tell({ open: true, tabs });
    source.onerror = () => {
      this.#tell({ open: false });
      // Refused for good (the server answered with an error): the browser will not try again.
      if (source.readyState === EventSource.CLOSED && this.#source === source) this.#soon(AGAIN_MS);
    };
    source.addEventListener("feed", (event) => {
      const { ok, silent_since } = JSON.parse(event.data);
      this.#tell({ feed: ok, silent: silent_since });
    });
    for (const kind of ["delta", "resync", "beat"]) {
      source.addEventListener(kind, (event) => this.#came(kind, event));
    }
  }

  #came(kind, event) {
    this.#heard = Date.now();
    const id = event.lastEventId;
    const message = { kind, id, ...JSON.parse(event.data) };
    // A tab that has come since is not told by this connection, so nothing moves it on.
    for (const tab of this.#status.tabs) {
      const member = this.#members.get(tab);
      if (kind === "resync" && !message.topic && member) member.after = "";
      else if (member && newer(id, member.after)) member.after = id;
    }
    this.#say(message);
  }

  #tell(change) {
    this.#heard = Date.now();
    this.#status = { ...this.#status, ...change };
    this.#say(this.#status);
  }

  #say(message) {
    this.#channel?.postMessage(message);
    this.#pass(message);
  }

  #pass(message) {
    if (message.kind === "status") this.#covered = message.tabs.includes(this.#tab);
    if (!this.#covered) return;
    const { topic } = parts(this.address());
    if (message.topic && topic !== "list" && topic !== message.topic) return;
    this.on(message);
  }
}
