// Live updates: server-sent events through the stream that all tabs share (lib/stream.js), with
// polling as a fallback.
//
// Connection states, shown in the header: live, reconnecting, polling, ended. A live connection of a
// run whose data is late shows the age of the data.

import { h, setText } from "./dom.js";
import { isStale, lateness, showSilent, showStale } from "./banners.js";
import { age } from "./format.js";
import { newer } from "./stream.js";

const POLL_MS = 5000;
const PATIENCE_MS = 4000; // how long to reconnect before polling starts
const SPREAD_MS = 1000;

const LABELS = {
  connecting: "Connecting",
  live: "Live",
  reconnecting: "Reconnecting",
  polling: "Polling every 5 s",
  ended: "Ended",
  signedout: "Signed out",
};

export class SignedOut extends Error {}

/** Fetch from the server; a redirect to the sign-in page raises SignedOut. */
async function ask(address, kind) {
  const response = await fetch(address, { headers: { Accept: kind } });
  if (response.status === 401 || response.redirected) throw new SignedOut("signed out");
  // 422: a partial result; the body names the missing parts.
  if (!response.ok && response.status !== 422) throw new Error(`${address}: ${response.status}`);
  return response;
}

export const getJSON = async (address) => (await ask(address, "application/json")).json();

/** An HTML fragment rendered and escaped by the server. */
export const getHTML = async (address) => (await ask(address, "text/html")).text();

// The number changes with the messages of lib/stream.js: tabs of an older version keep their worker.
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
  #resync = 0;

  /** `topic`: a run's id or "list", followed at `stream` from `after()` on. `onDelta(delta, id)`;
   *  `poll(): Promise` brings everything up to date. `run()`: the run whose late data is shown. */
  constructor({ stream, topic, after, onDelta, poll, dot, run }) {
    Object.assign(this, { stream, topic, after, onDelta, poll, dot });
    this.state = "";
    if (run) setInterval(() => run() && this.#showAge(run()), 1000);
    // A page in the back/forward cache must not follow the stream.
    addEventListener("pagehide", () => this.#leave());
    addEventListener("pageshow", (event) => event.persisted && !this.over && (this.poll(), this.start()));
  }

  get over() {
    return this.state === "ended" || this.state === "signedout";
  }

  start() {
    this.#show(this.#polling ? "polling" : "connecting");
    this.#open = false;
    this.#lose();
    this.#join();
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
    if (!navigator.locks) { // plain HTTP from another machine
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
    if (message.kind === "status") {
      this.#open = message.open;
      this.#feedOk = message.feed;
      showSilent(message.silent);
      this.#settle();
      return;
    }
    if (message.kind === "resync" && !message.topic) {
      this.#last = ""; // lost messages are unknown, and the server's ids can start over
      this.#pollSoon();
      return;
    }
    // The shared stream can start before this page's cursor.
    const known = !newer(message.id, this.#last);
    if (!known) this.#last = message.id;
    if (known) return;
    if (message.kind === "delta") this.onDelta(message.delta, message.id);
    else if (message.kind === "resync") this.#pollSoon();
  }

  /** Close: the run has ended and nothing changes any more. */
  end() {
    this.#leave();
    this.#stopPolling();
    this.#show("ended");
  }

  /** Show the age of late data. */
  #showAge(run) {
    showStale(Number(isStale(run)));
    if (this.state !== "live") return;
    const seconds = lateness(run);
    this.dot.toggleAttribute("data-late", seconds > 0);
    setText(this.dot, seconds ? `No data for ${age(seconds)}` : LABELS.live);
    this.dot.title = seconds ? "The page is connected, but the replicas have sent no telemetry" : "";
  }

  #settle() {
    if (!this.#open) {
      this.#lose();
      return;
    }
    clearTimeout(this.#patience);
    this.#patience = 0;
    if (this.#feedOk) {
      this.#stopPolling();
      this.#show("live");
    } else this.#startPolling();
  }

  #lose() {
    if (this.#polling) return;
    if (this.state === "live") this.#show("reconnecting");
    if (!this.#patience) this.#patience = setTimeout(() => this.#startPolling(), PATIENCE_MS);
  }

  #startPolling() {
    this.#patience = 0;
    if (this.over) return;
    this.#show("polling");
    if (this.#polling) return;
    this.#polling = true;
    const again = async () => {
      await this.#pollOnce();
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
    this.#resync = setTimeout(() => this.over || this.#pollOnce(), Math.random() * SPREAD_MS);
  }

  async #pollOnce() {
    try {
      await this.poll();
    } catch (error) {
      if (!(error instanceof SignedOut)) return; // retried later; the connection indicator shows the state
      this.#leave();
      this.#stopPolling();
      this.#show("signedout");
    }
  }

  #show(state) {
    if (this.over || this.state === state) return;
    this.state = state;
    if (!this.dot) return;
    this.dot.dataset.state = state;
    this.dot.textContent = LABELS[state];
    delete this.dot.dataset.late;
    this.dot.title = "";
    if (state === "signedout") {
      const next = encodeURIComponent(location.pathname + location.search);
      this.dot.append(": ", h("a", { href: `/login?next=${next}` }, "sign in again"));
    }
  }
}
