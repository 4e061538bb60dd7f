// The backend's own log of one attempt: the newest lines first asked for, then what comes behind
// them, for as long as the job runs and somebody looks. Following stops when somebody scrolls up.

import { h, setText } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";

const EVERY_MS = 3000;
const WINDOW = 2000;

export function backendLog(box, said, address) {
  const attempt = box.dataset.attempt;
  let after = "";
  let over = false;
  let timer = 0;

  async function load() {
    clearTimeout(timer);
    if (document.hidden) return;
    setText(said, after ? said.textContent : "Asking…");
    try {
      const answer = await getJSON(`${address}?attempt=${attempt}&after=${encodeURIComponent(after)}`);
      show(answer);
      over = answer.ended && !answer.unknown && !answer.lines.length;
    } catch {
      setText(said, "the server was not reached");
    }
    if (!over) timer = setTimeout(load, EVERY_MS);
  }

  function show({ lines, position, cut, unknown, ended }) {
    const following = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
    if (unknown) {
      setText(said, "unknown");
      if (!box.querySelector("p:not(.unknown)")) box.replaceChildren(h("p.unknown", {}, unknown));
      else said.title = unknown;
      return;
    }
    box.querySelector(".unknown")?.remove();
    if (cut) box.append(h("p.cut", {}, "… lines were left out"));
    box.append(...lines.map((line) => h("p", {}, line)));
    while (box.children.length > WINDOW) box.firstElementChild.remove();
    after = position;
    setText(said, box.children.length ? (ended ? "complete" : "following") : "nothing was printed yet");
    if (following) box.scrollTop = box.scrollHeight;
  }

  document.addEventListener("visibilitychange", () => !document.hidden && !over && load());
  load();
}
