// The page of one replica. The server renders the changing parts; they are fetched again when the
// run's stream reports a change of this replica. The log is polled while it is visible.

import { showSilent } from "./lib/banners.js";
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

  /** Server and run status of a fetched part. */
  function banners(place) {
    const { silent, state, seen } = $("[data-silent]", place).dataset;
    showSilent(silent === "no" ? null : silent);
    known.run = { ...known.run, state, last_seen_at: seen };
  }
  banners(page);

  function replace(html) {
    const made = document.createElement("template");
    made.innerHTML = html;
    banners(made.content);
    const place = $("[data-part]", page);
    // Do not replace a part that has the selection or the focus.
    const focused = place.contains(document.activeElement) ? document.activeElement : null;
    const act = focused?.closest("[data-act]")?.dataset.act;
    if ((focused && !act) || (!getSelection().isCollapsed && place.contains(getSelection().anchorNode))) return;
    place.replaceChildren(made.content);
    if (act) $(`[data-act="${act}"] button`, place)?.focus();
    tickTimes(place);
  }

  // The charts need a store: here it holds the latest delta of this replica.
  const points = { run: true, fresh: [], listen: (listener) => (points.notify = listener) };
  const draw = board({ store: points, page }, $("[data-board]", page));
  draw(new Set());

  const soon = oncePerFrame(() => refresh().catch(() => {}));
  const live = new Live({
    dot: $("[data-conn]"),
    stream: page.dataset.stream,
    topic: page.dataset.run,
    after: () => "",
    onDelta: (delta) => {
      showSilent(null); // a worker published it
      if (delta.run) known.run = delta.run;
      points.fresh = (delta.points ?? []).filter((columns) => columns.replica === number && columns.value.length);
      points.notify(new Set(["points"]));
      draw(new Set(["points"]));
      const mine = delta.replicas?.find((row) => row.number === number);
      if (!mine || JSON.stringify(mine) === JSON.stringify(known.replica)) return;
      known.replica = mine;
      soon();
    },
    poll: refresh,
    run: () => known.run,
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
