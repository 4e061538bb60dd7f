// The page of one replica. What moves is rendered by the server and fetched again when the run's
// stream says that something of this replica has changed; the log is asked for while it is looked at.

import { isStale, showSilent, showStale } from "./lib/banners.js";
import { $, oncePerFrame } from "./lib/dom.js";
import { getHTML, Live } from "./lib/live.js";
import { tickTimes } from "./lib/times.js";
import { backendLog } from "./run/backend_log.js";
import { board } from "./run/board.js";
import { replicaDialog } from "./run/actions.js";

export function replicaPage() {
  const page = $("[data-replica-page]");
  const number = Number(page.dataset.number);
  const known = { run: null, replica: null };
  let busy = false;
  let again = false;

  async function refresh() {
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    try {
      const query = new URLSearchParams(location.search);
      query.set("part", "1");
      replace(await getHTML(`?${query}`));
    } finally {
      busy = false;
      if (again) {
        again = false;
        setTimeout(() => refresh().catch(() => {}), 500);
      }
    }
  }

  /** What the server says of itself and of the run, beside what moves. */
  function banners(place) {
    const { silent, state, seen } = $("[data-silent]", place).dataset;
    showSilent(silent === "no" ? null : silent);
    known.run = { ...known.run, state, last_seen_at: seen };
  }
  banners(page);
  setInterval(() => showStale(Number(isStale(known.run))), 1000);

  function replace(html) {
    const made = document.createElement("template");
    made.innerHTML = html;
    banners(made.content);
    const place = $("[data-part]", page);
    // Not under somebody's hands: what is being selected or is focused stays; buttons come again.
    const focused = place.contains(document.activeElement) ? document.activeElement : null;
    const act = focused?.closest("[data-act]")?.dataset.act;
    if ((focused && !act) || (!getSelection().isCollapsed && place.contains(getSelection().anchorNode))) return;
    place.replaceChildren(made.content);
    if (act) $(`[data-act="${act}"] button`, place)?.focus();
    tickTimes(place);
  }

  // The charts want a store: here it is what came last, of this replica alone.
  const points = { run: true, fresh: [], listen: (told) => (points.tell = told) };
  const draw = board({ store: points, page }, $("[data-board]", page));
  draw(new Set());

  const soon = oncePerFrame(() => refresh().catch(() => {}));
  const live = new Live({
    dot: $("[data-conn]"),
    stream: () => page.dataset.stream,
    onDelta: (delta) => {
      showSilent(null); // a worker has told it
      if (delta.run) known.run = delta.run;
      points.fresh = (delta.points ?? []).filter((columns) => columns.replica === number && columns.value.length);
      points.tell(new Set(["points"]));
      draw(new Set(["points"]));
      const mine = delta.replicas?.find((row) => row.number === number);
      if (!mine || JSON.stringify(mine) === JSON.stringify(known.replica)) return;
      known.replica = mine;
      soon();
    },
    poll: refresh,
  });
  if (page.dataset.ended) live.end();
  else live.start();

  const log = $("[data-log-lines]", page);
  if (log) backendLog(log, $("[data-log-state]", page), page.dataset.log);

  if ($("[data-act]", page)) {
    const ask = replicaDialog();
    page.addEventListener("submit", (event) => {
      const form = event.target.closest("[data-act]");
      if (!form) return;
      event.preventDefault();
      ask(form.dataset.act, number, form.action, known);
    });
  }
}
