// One stream for several pages. It runs in a shared worker (live_worker.js) for all tabs of a
// browser: HTTP/1.1 allows six connections to a server, so with one stream per tab the seventh tab
// would never load. Where a browser has no SharedWorker, each page runs its own.
//
// A page joins with the topic that it follows and its cursor in it. The connection is made again
// with the topics and cursors of all pages when a page joins, and when the server is silent.

const BEAT_MS = 15_000; // heartbeat interval of the server
const GATHER_MS = 150; // pages that join within this time share one connection
// How long the topic of a page that left is kept: the user may be navigating.
const LINGER_MS = 1000;
const AGAIN_MS = 5000;

/** Whether stream id `a` is newer than `b`; '' is older than all. */
export function newer(a, b) {
  if (!a || !b) return Boolean(a);
  const [ams, an = 0] = a.split("-").map(Number);
  const [bms, bn = 0] = b.split("-").map(Number);
  return ams === bms ? an > bn : ams > bms;
}

/** The list follows every run, but not the alerts. */
const follows = (topic, other) => topic === other || (topic === "list" && other !== "alerts");

export class Stream {
  #pages = new Map(); // port -> { topic, after, covered: whether the connection includes it }
  #source = null;
  #status = {};
  #timer = 0;

  /** Serve the page behind `port`, from its message {address, topic, after, lock} to the message
   * null, or until the page no longer holds the Web Lock `lock`: a page that crashes sends none. */
  add(port) {
    port.onmessage = ({ data }) => (data ? this.#join(port, data) : this.#leave(port));
  }

  #join(port, { address, topic, after, lock }) {
    this.#pages.set(port, { address, topic, after, covered: false });
    if (lock) navigator.locks.request(lock, () => this.#leave(port));
    this.#connectIn(GATHER_MS);
  }

  #leave(port) {
    const gone = this.#pages.get(port);
    if (!this.#pages.delete(port)) return;
    const left = [...this.#pages.values()];
    if (!left.length) this.#close();
    else if (!left.some(({ topic }) => topic === gone.topic)) this.#connectIn(LINGER_MS);
  }

  #close() {
    clearTimeout(this.#timer);
    this.#source?.close();
  }

  #connectIn(ms) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#connect(), ms);
  }

  #connect() {
    this.#close();
    const pages = [...this.#pages.values()];
    const topics = new Map();
    for (const page of pages) {
      const { topic, after } = page;
      const oldest = topics.get(topic);
      // A page without a position polls: the others must not lose theirs.
      if (!oldest || (after && newer(oldest, after))) topics.set(topic, after);
      page.covered = true;
    }
    const query = new URLSearchParams([...topics].map((cursor) => ["topic", cursor.join(":")]));
    const source = new EventSource(`${pages[0].address}?${query}`);
    this.#source = source;
    this.#status = { kind: "status", open: false, feed: true };
    this.#heard();
    source.onopen = () => this.#notify({ open: true });
    source.onerror = () => {
      this.#notify({ open: false });
      // The server responded with an error: the browser does not retry.
      if (source.readyState === EventSource.CLOSED) this.#connectIn(AGAIN_MS);
    };
    source.addEventListener("feed", ({ data }) => {
      const { ok, silent_since } = JSON.parse(data);
      this.#notify({ feed: ok, silent: silent_since });
    });
    for (const kind of ["delta", "resync", "beat"]) {
      source.addEventListener(kind, ({ data, lastEventId: id }) => {
        this.#send({ kind, id, ...JSON.parse(data) });
      });
    }
  }

  /** Replace a connection that is silent for too long. */
  #heard() {
    if ([...this.#pages.values()].every((page) => page.covered)) this.#connectIn(3 * BEAT_MS);
  }

  #notify(change) {
    this.#status = { ...this.#status, ...change };
    this.#send(this.#status);
  }

  /** Send a message to the pages that follow its topic. A page that joined after the connection was
   *  made gets nothing: it would miss the messages before this one. */
  #send(message) {
    this.#heard();
    const lost = message.kind === "resync" && !message.topic;
    for (const [port, page] of this.#pages) {
      if (!page.covered) continue;
      if (lost) page.after = "";
      else if (newer(message.id, page.after)) page.after = message.id;
      if (!message.topic || follows(page.topic, message.topic)) port.postMessage(message);
    }
  }
}
