// The newest log lines, while the tab is open. Following stops when somebody scrolls up.

import { $, h } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { getJSON } from "../lib/live.js";

const EVERY_MS = 3000;
const WINDOW = 2000;

export function logLines({ store, page }, card) {
  const who = $("[data-who]", card);
  const box = $("[data-lines]", card);
  let after = 0;
  let timer = 0;
  let generation = 0;
  const visible = () => page.dataset.tab === "logs" && !document.hidden;

  async function load() {
    clearTimeout(timer);
    if (!visible()) return;
    const mine = generation;
    try {
      const { lines } = await getJSON(`${page.dataset.logs}?after=${after}&replica=${who.value}`);
      if (mine === generation) append(lines);
    } catch {
      // the connection's dot says how it is; the next try may work
    }
    timer = setTimeout(load, EVERY_MS);
  }

  function append(lines) {
    const following = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
    if (lines.length) box.querySelector(".empty-s")?.remove();
    for (const line of lines) {
      after = Math.max(after, line.id);
      box.append(h("p", { dataset: { level: line.level.toLowerCase() } },
        h("time", { datetime: line.at, title: format.when(line.at) }, format.clock(line.at)),
        h("span", {}, `replica ${line.replica}`), h("span", {}, line.level), h("span", {}, line.message)));
    }
    while (box.children.length > WINDOW) box.firstElementChild.remove();
    if (!box.children.length) box.append(h("p.empty-s", {}, "No replica has said anything yet."));
    if (following && lines.length) box.scrollTop = box.scrollHeight;
  }

  who.addEventListener("change", () => {
    generation++;
    after = 0;
    box.replaceChildren();
    load();
  });
  document.addEventListener("visibilitychange", load);
  return (changed) => {
    if (changed.has("replicas")) {
      for (const replica of store.replicaRows()) {
        if (!$(`option[value="${replica.number}"]`, who)) who.append(h("option", { value: replica.number }, `Replica ${replica.number}`));
      }
    }
    if (changed.has("tab")) load();
  };
}
