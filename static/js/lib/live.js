// One connection to the server: server-sent events where they can be had, polling where not.
//
// States, shown by the dot in the header: live, reconnecting, polling, ended. The browser's own
// EventSource reconnects and says where it was; this adds the fall-back, and looks after the
// cases in which EventSource gives up for good (the server answered with an error).

const POLL_MS = 5000;
const PATIENCE_MS = 4000; // how long "reconnecting" may last before polling begins

const WORDS = {
  connecting: "Connecting",
  live: "Live",
  reconnecting: "Reconnecting",
  polling: "Polling every 5 s",
  ended: "Ended",
  signedout: "Signed out",
};

export class SignedOut extends Error {}

/** JSON from our own server; a redirect to the sign-in page is an error of its own. */
export async function getJSON(address) {
  const response = await fetch(address, { headers: { Accept: "application/json" } });
  if (response.status === 401 || (response.redirected && new URL(response.url).pathname.endsWith("/login"))) {
    throw new SignedOut("signed out");
  }
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  return response.json();
}

export class Live {
  #source = null;
  #pollTimer = 0;
  #patience = 0;
  #feedOk = true;
  #polling = false;

  /** `stream(): address`, `onDelta(delta, id)`, `poll(): Promise` brings everything up to date. */
  constructor({ stream, onDelta, poll, dot }) {
    Object.assign(this, { stream, onDelta, poll, dot });
    this.state = "";
    // A page that is put away must not hold one of the browser's six connections.
    addEventListener("pagehide", () => this.#source?.close());
    addEventListener("pageshow", (event) => event.persisted && !this.over && (this.poll(), this.start()));
  }

  get over() {
    return this.state === "ended" || this.state === "signedout";
  }

  start() {
    this.#source?.close();
    this.#show(this.#polling ? "polling" : "connecting");
    this.#lose();
    const source = new EventSource(this.stream());
    this.#source = source;
    source.onopen = () => this.#settle();
    source.onerror = () => {
      if (this.over) return;
      this.#lose();
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.over || this.start(), POLL_MS);
    };
    source.addEventListener("delta", (event) => this.onDelta(JSON.parse(event.data), event.lastEventId));
    source.addEventListener("resync", () => this.#pollOnce());
    source.addEventListener("feed", (event) => {
      this.#feedOk = JSON.parse(event.data).ok;
      this.#settle();
    });
  }

  /** Nothing will change any more. */
  end() {
    this.#source?.close();
    this.#stopPolling();
    this.#show("ended");
  }

  #settle() {
    clearTimeout(this.#patience);
    this.#patience = 0;
    if (this.#source?.readyState !== EventSource.OPEN) return;
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

  async #pollOnce() {
    try {
      await this.poll();
    } catch (error) {
      if (!(error instanceof SignedOut)) return; // the next try may work; the dot says how it is
      this.#source?.close();
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
      const link = document.createElement("a");
      link.href = `/login?next=${encodeURIComponent(location.pathname + location.search)}`;
      link.textContent = "sign in again";
      this.dot.append(": ", link);
    }
  }
}
