// Live updates: server-sent events through the stream that all tabs share (lib/stream.js), with
// polling as a fallback.
//
// Connection states, shown in the header: connecting, live, polling, silent (connected, but no
// worker is running), offline (polls fail), and at the end ended or signedout. A live connection of
// a run whose data is late shows the age of the data.

import { h, setText } from "./dom.js";
import { isStale, isWorkerSilent, lateness, showSilent, showStale } from "./banners.js";
import { age, ago } from "./format.js";
import { newer } from "./stream.js";

const POLL_MS = 5000;
const PATIENCE_MS = 4000; // how long to reconnect before polling starts
const SPREAD_MS = 1000;
// Four heartbeats of the server: a stream or a poll without an answer for so long is lost.
const SILENT_MS = 60_000;
const LONGEST_SILENCE_MS = 30_000; // of a request

const LABELS = {
  connecting: "Connecting",
  live: "Live",
  polling: "Polling every 5 s",
  silent: "No worker",
  offline: "Offline",
  ended: "Ended",
  signedout: "Signed out",
};

export class SignedOut extends Error {}

export class NotFound extends Error {}

/** Fetch a text from the server; a redirect to the sign-in page raises SignedOut, status 404
 *  NotFound. An error is raised if nothing arrives for LONGEST_SILENCE_MS. */
async function ask(address, kind) {
  const abort = new AbortController();
  let timer = 0;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), LONGEST_SILENCE_MS);
  };
  wait();
  try {
    const reader = (await checked(address, kind, abort.signal)).body.getReader();
    const decoder = new TextDecoder();
    for (let text = ""; ; ) {
      wait();
      const { value, done } = await reader.read();
      text += decoder.decode(value, { stream: !done });
      if (done) return text;
    }
  } finally {
    clearTimeout(timer);
  }
}

async function checked(address, kind, signal) {
  const response = await fetch(address, { headers: { Accept: kind }, signal });
  if (response.status === 401 || response.redirected) throw new SignedOut("signed out");
  if (response.status === 404) throw new NotFound(address);
  // 422: a partial result; the body names the missing parts.
  if (!response.ok && response.status !== 422) throw new Error(`${address}: ${response.status}`);
  return response;
}

export const getJSON = async (address) => JSON.parse(await ask(address, "application/json"));

const LONGEST_MS = 1000;
let first = Promise.resolve();

/** Ask for what is at the top of the page: `getLater` waits for the answer, a second at most. A
 * process of the server answers one request at a time, and shares its time between those that it
 * has. */
export function getFirst(address) {
  const answer = getJSON(address);
  const longest = new Promise((resolve) => setTimeout(resolve, LONGEST_MS));
  first = Promise.race([Promise.allSettled([answer]), longest]);
  return answer;
}

export const getLater = (address) => first.then(() => getJSON(address));

/** An HTML fragment rendered and escaped by the server. */
export const getHTML = (address) => ask(address, "text/html");

const cursor = () => document.body.dataset.cursor ?? "";

// The number changes with the messages of lib/stream.js: older tabs keep their worker.
const WORKER = "archipelago-live-1";

/** A port of the stream: in the shared worker, or of this page (Chromium on Android has none). */
function connect() {
  const script = new URL("./live_worker.js", import.meta.url);
  if (window.SharedWorker) return new SharedWorker(script, { type: "module", name: WORKER }).port;
  const { port1, port2 } = new MessageChannel();
  import(script).then(({ serve }) => serve(port2));
  return port1;
}

export class Live {
  #port = null;
  #release = () => {}; // releases the lock that shows the worker that this page is open
  #last = ""; // id of the newest delta that was delivered
  #open = false;
  #feedOk = true;
  #pollTimer = 0;
  #patience = 0;
  #polling = false;
  #failing = false; // whether the newest poll failed
  #updatedAt = performance.timeOrigin; // when the server last answered; at first with this page
  #resync = 0;
  #loads = new Set(); // of each poll under way: the deltas that came since it began

  /** `topic`: a run's id or "list", followed at `stream` from `after()` on, or from the position at
   *  which the server began with the page; a page without a position polls once it gets one.
   *  `onDelta(delta, id)`; `poll(): Promise` brings everything up to date. `run()`: the run whose
   *  late data is shown. */
  constructor({ stream, topic, after = cursor, onDelta, poll, dot, run }) {
    Object.assign(this, { stream, topic, after, onDelta, poll, dot, run });
    this.state = "";
    setInterval(() => this.#tick(), 1000);
    // A page in the back/forward cache must not follow the stream.
    addEventListener("pagehide", () => this.#leave());
    addEventListener(
      "pageshow",
      (event) => event.persisted && !this.over && (this.load(), this.start()),
    );
  }

  get over() {
    return this.state === "ended" || this.state === "signedout";
  }

  start() {
    this.#open = false;
    this.#settle();
    this.#join();
  }

  /** Poll once; returns whether it succeeded. The answer can be older than deltas that came
   *  meanwhile, so those are applied again. */
  async load() {
    const deltas = [];
    this.#loads.add(deltas);
    try {
      await this.poll();
      for (const [delta, id] of deltas)
        if (newer(id, this.after())) this.onDelta(delta, id);
      this.#failing = false;
      this.#updatedAt = Date.now();
    } catch (error) {
      this.#failing = true; // the connection indicator shows it; retried later
      if (error instanceof SignedOut) this.#end("signedout");
    }
    this.#loads.delete(deltas);
    this.#draw();
    return !this.#failing;
  }

  #join() {
    const port = connect();
    this.#port = port;
    port.onmessage = ({ data }) => this.#on(data);
    const join = (lock) => {
      const after = newer(this.#last, this.after()) ? this.#last : this.after();
      const address = new URL(this.stream, location.href).href;
      port.postMessage({ address, topic: this.topic, after, lock });
    };
    if (!navigator.locks) {
      // plain HTTP from another machine
      join(null);
      return;
    }
    const lock = `${WORKER}:${Math.random()}`;
    navigator.locks.request(lock, () => {
      join(lock);
      return new Promise((resolve) => (this.#release = resolve));
    });
  }

  #leave() {
    this.#port?.postMessage(null);
    this.#release();
  }

  #on(message) {
    if (this.over) return;
    const isStatus = message.kind === "status";
    this.#open = isStatus ? message.open : true;
    if (this.#open) this.#updatedAt = Date.now();
    if (isStatus) {
      this.#feedOk = message.feed;
      showSilent(message.silent);
    }
    this.#settle();
    if (message.kind === "resync" && !message.topic) {
      this.#last = ""; // lost messages are unknown, and the server's ids can start over
      this.#pollSoon();
      return;
    }
    // The shared stream can start before this page's cursor.
    if (!newer(message.id, this.#last)) return;
    // Without a position the page can have missed everything before this message.
    if (!this.#last && !this.after()) this.#pollSoon();
    this.#last = message.id;
    if (message.kind === "delta") {
      for (const deltas of this.#loads) deltas.push([message.delta, message.id]);
      this.onDelta(message.delta, message.id);
    } else if (message.kind === "resync") this.#pollSoon();
    this.#draw();
  }

  /** Close: the run has ended and nothing changes any more. */
  end() {
    showSilent(null);
    showStale(0);
    this.#end("ended");
  }

  #end(state) {
    this.#leave();
    this.#stopPolling();
    this.#show(state);
  }

  #tick() {
    if (this.over) return;
    if (this.#open && Date.now() - this.#updatedAt > SILENT_MS) {
      this.#open = false;
      this.#settle();
    }
    this.#draw();
  }

  get #isLive() {
    return this.#open && this.#feedOk;
  }

  /** Start or stop polling, as the stream is lost or open. */
  #settle() {
    if (this.#isLive) this.#stopPolling();
    else if (this.#open)
      this.#startPolling(); // the server has lost its own stream: it can be polled
    else if (!this.#polling && !this.#patience)
      this.#patience = setTimeout(() => this.#startPolling(), PATIENCE_MS);
    this.#draw();
  }

  #startPolling() {
    clearTimeout(this.#patience);
    this.#patience = 0;
    if (this.over || this.#polling) return;
    this.#polling = true;
    const again = async () => {
      await this.load();
      if (this.#polling) this.#pollTimer = setTimeout(again, POLL_MS);
    };
    again();
  }

  #stopPolling() {
    this.#polling = false;
    clearTimeout(this.#pollTimer);
    clearTimeout(this.#patience);
    this.#patience = 0;
  }

  /** Add jitter: many pages are notified at the same time. */
  #pollSoon() {
    clearTimeout(this.#resync);
    this.#resync = setTimeout(() => this.over || this.load(), Math.random() * SPREAD_MS);
  }

  get #connection() {
    if (!this.#isLive) {
      const isHung = this.#polling && Date.now() - this.#updatedAt > SILENT_MS;
      if (this.#failing || isHung) return "offline";
      if (!this.#polling) return "connecting";
    }
    if (isWorkerSilent()) return "silent";
    return this.#isLive ? "live" : "polling";
  }

  /** Show the connection, and the age of data that is late. */
  #draw() {
    if (this.over) return;
    this.#show(this.#connection);
    const run = this.run?.();
    if (run) showStale(Number(isStale(run)), age(lateness(run)));
    if (!this.dot) return;
    const late_s = this.state === "live" && run ? lateness(run) : 0;
    this.dot.toggleAttribute("data-late", late_s > 0);
    this.dot.title = late_s ? "The page is connected, but the replicas have sent no telemetry" : "";
    if (late_s) setText(this.dot, `No data for ${age(late_s)}`);
    else if (this.state === "offline") {
      setText(
        this.dot,
        `${LABELS.offline}, last update ${ago((Date.now() - this.#updatedAt) / 1000)}`,
      );
    } else setText(this.dot, LABELS[this.state]);
  }

  #show(state) {
    if (this.over || this.state === state) return;
    this.state = state;
    if (!this.dot) return;
    this.dot.dataset.state = state;
    this.dot.textContent = LABELS[state];
    this.dot.removeAttribute("data-late");
    this.dot.title = "";
    if (state === "signedout") {
      const next = encodeURIComponent(location.pathname + location.search);
      this.dot.append(": ", h("a", { href: `/login?next=${next}` }, "sign in again"));
    }
  }
}
