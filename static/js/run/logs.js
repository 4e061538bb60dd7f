// The newest log lines, while the tab is open: searched by the server, followed until somebody scrolls
// up. A line has an address of its own, which shows those around it.

import { $, h, setText, url } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { getJSON } from "../lib/live.js";

const EVERY_MS = 3000;
const WINDOW = 2000;

export function logLines({ store, page }, card) {
  const box = $("[data-lines]", card);
  const state = $("[data-follow]", card);
  const asked = { replica: $("[data-who]", card), q: $("[data-find]", card), level: $("[data-level]", card) };
  let after = 0;
  let timer = 0;
  let generation = 0;
  let line = url.get("line");
  const visible = () => page.dataset.tab === "logs" && !document.hidden;
  const atEnd = () => box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
  const say = () => setText(state, line ? `around line ${line}` : !box.children.length || atEnd() ? "following" : "not following: scroll to the end");
  asked.q.value = url.get("q") ?? "";
  asked.level.value = url.get("level") ?? "";

  async function load() {
    clearTimeout(timer);
    if (!visible()) return;
    const mine = generation;
    const query = new URLSearchParams({ after, replica: asked.replica.value, q: asked.q.value, level: asked.level.value, ...(line ? { line } : {}) });
    try {
      const { lines } = await getJSON(`${page.dataset.logs}?${query}`);
      if (mine === generation) append(lines);
    } catch {
      // the connection's dot says how it is; the next try may work
    }
    if (!line) timer = setTimeout(load, EVERY_MS);
  }

  function append(lines) {
    const following = atEnd();
    if (lines.length) box.querySelector(".empty-s")?.remove();
    for (const one of lines) {
      after = Math.max(after, one.id);
      box.append(h("p", { dataset: { level: one.level.toLowerCase(), id: one.id } },
        h("a", { href: `?tab=logs&line=${one.id}`, title: `${format.when(one.at)}: link to this line` }, h("time", { datetime: one.at }, format.clock(one.at))),
        h("span", {}, `replica ${one.replica}`), h("span", {}, one.level), h("span", {}, one.message)));
    }
    while (box.children.length > WINDOW) box.firstElementChild.remove();
    if (!box.children.length) box.append(h("p.empty-s", {}, asked.q.value || asked.level.value ? "No line is like that." : "No replica has said anything yet."));
    const marked = line && $(`[data-id="${Number(line)}"]`, box);
    if (marked) {
      marked.setAttribute("aria-current", "true");
      box.scrollTop = marked.offsetTop - box.offsetTop - box.clientHeight / 2;
    } else if (following && lines.length) box.scrollTop = box.scrollHeight;
    say();
  }

  card.addEventListener("change", () => {
    generation++;
    after = 0;
    line = null;
    box.replaceChildren();
    url.set({ replica: asked.replica.value || null, q: asked.q.value || null, level: asked.level.value || null, line: null });
    load();
  });
  box.addEventListener("scroll", say);
  document.addEventListener("visibilitychange", load);
  return (changed) => {
    if (changed.has("replicas")) {
      for (const replica of store.replicaRows()) {
        if (!$(`option[value="${replica.number}"]`, asked.replica)) asked.replica.append(h("option", { value: replica.number, selected: String(replica.number) === url.get("replica") }, `Replica ${replica.number}`));
      }
    }
    if (changed.has("tab")) load();
  };
}
