// The newest log lines while the tab is open: searched by the server, followed until the user
// scrolls up. Each line has a link that shows its context.

import { $, $$, h, setText, url } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { isEdited } from "../lib/forms.js";
import { getJSON } from "../lib/live.js";

const EVERY_MS = 3000;
const WINDOW = 2000;

export function logLines({ store, page }, card) {
  const box = $("[data-lines]", card);
  const state = $("[data-follow]", card);
  const asked = {
    replica: $("[data-who]", card),
    q: $("[data-find]", card),
    level: $("[data-level]", card),
  };
  let after = 0;
  let timer = 0;
  let generation = 0;
  let line = url.get("line");
  const visible = () => page.dataset.tab === "logs" && !document.hidden;
  const atEnd = () => box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
  const showState = () => {
    const following = !box.children.length || atEnd();
    const text = following ? "following" : "not following: scroll to the end";
    setText(state, line ? `around line ${line}` : text);
  };
  const filters = () =>
    Object.fromEntries(Object.entries(asked).map(([name, input]) => [name, input.value]));
  // A filter that was set or cleared while this script was loaded applies.
  const edited = ["q", "level"].filter((name) => isEdited(asked[name]));
  for (const name of ["q", "level"])
    if (!edited.includes(name)) asked[name].value = url.get(name) ?? "";
  if (edited.length && visible() && line === null)
    url.set({ q: asked.q.value, level: asked.level.value });

  /** The downloads have the filters of the list. */
  function files() {
    const { replica, q, level } = filters();
    const query = new URLSearchParams(
      Object.entries({ replica, text: q, level }).filter(([, value]) => value),
    );
    for (const anchor of $$("[data-log-file]", card)) anchor.search = query.toString();
  }

  async function load() {
    clearTimeout(timer);
    files();
    if (!visible()) return;
    const requested = ++generation; // a request under way has the lines that this one gets
    const query = new URLSearchParams({ after, ...filters(), ...(line ? { line } : {}) });
    try {
      const { lines } = await getJSON(`${page.dataset.logs}?${query}`);
      if (requested === generation) append(lines);
    } catch {
      // retried later; the connection indicator shows the state
    }
    if (!line && requested === generation) timer = setTimeout(load, EVERY_MS);
  }

  function append(lines) {
    const following = atEnd();
    if (lines.length) box.querySelector(".empty-s")?.remove();
    for (const one of lines) {
      after = Math.max(after, one.id);
      box.append(row(one));
    }
    while (box.children.length > WINDOW) box.firstElementChild.remove();
    if (!box.children.length) {
      const searched = asked.q.value || asked.level.value;
      box.append(h("p.empty-s", {}, searched ? "No matching lines." : "No log lines yet."));
    }
    const marked = line && $(`[data-id="${Number(line)}"]`, box);
    if (marked) {
      marked.setAttribute("aria-current", "true");
      box.scrollTop = marked.offsetTop - box.offsetTop - box.clientHeight / 2;
    } else if (following && lines.length) box.scrollTop = box.scrollHeight;
    showState();
  }

  card.addEventListener("change", () => {
    after = 0;
    line = null;
    box.replaceChildren();
    url.set({ ...filters(), line: null });
    load();
  });
  box.addEventListener("scroll", showState);
  document.addEventListener("visibilitychange", load);
  return (changed) => {
    if (page.dataset.tab === "logs" && (changed.has("replicas") || changed.has("tab"))) {
      for (const { number } of store.replicaRows()) {
        if ($(`option[value="${number}"]`, asked.replica)) continue;
        const selected = String(number) === url.get("replica");
        asked.replica.append(h("option", { value: number, selected }, `Replica ${number}`));
      }
    }
    if (changed.has("tab")) load();
  };
}

function row({ id, at, level, replica, message }) {
  const title = `${format.when(at)}: link to this line`;
  const time = h("time", { datetime: at }, format.clock(at, { seconds: true }));
  return h("p", { dataset: { level: level.toLowerCase(), id } },
    h("a", { href: `?tab=logs&line=${id}`, title }, time),
    h("span", {}, `replica ${replica}`), h("span", {}, level), h("span", {}, message));
}
