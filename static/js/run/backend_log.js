// The backend's log of one attempt: fetches the newest lines, then follows while the job runs and
// the log is visible. Scrolling up stops following.

import { h, setText } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";

const EVERY_MS = 3000;
const WINDOW = 2000;

export function backendLog(box, status, address) {
  const attempt = box.dataset.attempt;
  let after = "";
  let over = false;
  let timer = 0;
  let newest = 0;

  async function load() {
    clearTimeout(timer);
    if (document.hidden) return;
    const number = ++newest; // a request under way has the lines that this one gets
    setText(status, after ? status.textContent : "Loading…");
    try {
      const answer = await getJSON(
        `${address}?attempt=${attempt}&after=${encodeURIComponent(after)}`,
      );
      if (number !== newest) return;
      show(answer);
      over = answer.ended && !answer.unknown && !answer.lines.length;
    } catch {
      if (number !== newest) return;
      setText(status, "server not reachable");
    }
    if (!over) timer = setTimeout(load, EVERY_MS);
  }

  function show({ lines, position, cut, unknown, ended }) {
    const following = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
    if (unknown) {
      setText(status, "unknown");
      if (!box.querySelector("p:not(.unknown)")) box.replaceChildren(h("p.unknown", {}, unknown));
      else status.title = unknown;
      return;
    }
    box.querySelector(".unknown")?.remove();
    if (cut) box.append(h("p.cut", {}, "… lines omitted"));
    box.append(...lines.map((line) => h("p", {}, line)));
    while (box.children.length > WINDOW) box.firstElementChild.remove();
    after = position;
    setText(status, box.children.length ? (ended ? "complete" : "following") : "no output yet");
    if (following) box.scrollTop = box.scrollHeight;
  }

  document.addEventListener("visibilitychange", () => !document.hidden && !over && load());
  load();
}
