// What a page sees of the server as it changes: server-sent events where they can be had (through
// the browser's one stream, lib/hub.js), polling where not.
//
// States, shown by the dot in the header: live, reconnecting, polling, ended.

import { h } from "./dom.js";
import { showSilent } from "./banners.js";
import { newer, Hub } from "./hub.js";

const POLL_MS = 5000;
const PATIENCE_MS = 4000; // how long "reconnecting" may last before polling begins
const SPREAD_MS = 1000;

const WORDS = {
  connecting: "Connecting",
  live: "Live",
  reconnecting: "Reconnecting",
  polling: "Polling every 5 s",
  ended: "Ended",
  signedout: "Signed out",
};

export class SignedOut extends Error {}

/** An answer of our own server; a redirect to the sign-in page is an error of its own. */
async function ask(address, kind) {
  const response = await fetch(address, { headers: { Accept: kind } });
  if (response.status === 401 || response.redirected) throw new SignedOut("signed out");
  // 422: some of what was asked for could not be had, and the rest is there.
  if (!response.ok && response.status !== 422) throw new Error(`${address}: ${response.status}`);
  return response;
}

export const getJSON = async (address) => (await ask(address, "application/json")).json();

/** Part of a page: our own server's template, escaped there. */
export const getHTML = async (address) => (await ask(address, "text/html")).text();

export class Live {
  #hub;
  #last = ""; // id of the newest delta that was passed on
  #open = false;
  #feedOk = true;
  #pollTimer = 0;
  #patience = 0;
  #polling = false;
  #resync = 0;

  /** `stream()`: the address of the page's own stream, with where it is (`after`); what it names is
   *  shared with other tabs. `onDelta(delta, id)`; `poll(): Promise` brings everything up to date. */
  constructor({ stream, onDelta, poll, dot }) {
    Object.assign(this, { stream, onDelta, poll, dot });
    this.state = "";
    this.#hub = new Hub({ address: () => this.#address(), on: (message) => this.#on(message) });
    // A page that is put away must neither hold a connection nor lead.
    addEventListener("pagehide", () => this.#hub.close());
    addEventListener("pageshow", (event) => event.persisted && !this.over && (this.poll(), this.start()));
  }

  get over() {
    return this.state === "ended" || this.state === "signedout";
  }

  start() {
    this.#show(this.#polling ? "polling" : "connecting");
    this.#open = false;
    this.#lose();
    this.#hub.open();
  }

  #address() {
    const url = new URL(this.stream(), location.href);
    if (newer(this.#last, url.searchParams.get("after") ?? "")) url.searchParams.set("after", this.#last);
    return url.pathname + url.search;
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
      this.#last = ""; // what was lost is not known, and the server's ids may begin anew
      this.#pollSoon();
      return;
    }
    // Another tab may have had the stream begin earlier than we need.
    const known = !newer(message.id, this.#last);
    if (!known) this.#last = message.id;
    if (known) return;
    if (message.kind === "delta") this.onDelta(message.delta, message.id);
    else if (message.kind === "resync") this.#pollSoon();
  }

  /** Nothing will change any more. */
  end() {
    this.#hub.close();
    this.#stopPolling();
    this.#show("ended");
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

  /** Many pages are told to load at once: not in the same instant. */
  #pollSoon() {
    clearTimeout(this.#resync);
    this.#resync = setTimeout(() => this.over || this.#pollOnce(), Math.random() * SPREAD_MS);
  }

  async #pollOnce() {
    try {
      await this.poll();
    } catch (error) {
      if (!(error instanceof SignedOut)) return; // the next try may work; the dot says how it is
      this.#hub.close();
      this.#stopPolling();
      this.#show("signedout");
    }
  }

  #show(state) {
    if (this.over || this.state === state) return;
    this.state = state;
    if (!this.dot) return;
    this.dot.dataset.state = state;
    this.dot.textContent = WORDS[state];
    if (state === "signedout") {
      this.dot.append(": ", h("a", { href: `/login?next=${encodeURIComponent(location.pathname + location.search)}` }, "sign in again"));
    }
  }
}
