// The page of one replica. The server renders the changing parts; they are fetched again when the
// run's stream reports a change of this replica. The log is polled while it is visible.

import "./base.js";
import { showSilent } from "./lib/banners.js";
import { $ } from "./lib/dom.js";
import { Live } from "./lib/live.js";
import { refreshed } from "./lib/part.js";
import { backendLog } from "./run/backend_log.js";
import { board } from "./run/board.js";
import { replicaDialog } from "./run/actions.js";

function replicaPage() {
  const page = $("[data-replica-page]");
  const number = Number(page.dataset.number);
  const known = { run: null, replica: null };

  /** Server and run status of a fetched part. */
  function banners(place) {
    const { silent, state, seen } = $("[data-silent]", place).dataset;
    showSilent(silent === "no" ? null : silent);
    // The answer can be older than the newest delta.
    if (!(Date.parse(known.run?.last_seen_at) > Date.parse(seen)))
      known.run = { ...known.run, state, last_seen_at: seen };
  }
  banners(page);

  const part = refreshed($("[data-part]", page), 500, banners);

  // The charts need a store: here it holds the latest delta of this replica.
  const points = { run: true, fresh: [], listen: (listener) => (points.notify = listener) };
  const draw = board({ store: points, page }, $("[data-board]", page));
  draw(new Set());

  const live = new Live({
    dot: $("[data-conn]"),
    stream: page.dataset.stream,
    topic: page.dataset.run,
    onDelta: (delta) => {
      showSilent(null); // a worker published it
      if (delta.run) known.run = delta.run;
      points.fresh = (delta.points ?? []).filter(
        (columns) => columns.replica === number && columns.value.length,
      );
      points.notify(new Set(["points"]));
      draw(new Set(["points"]));
      const mine = delta.replicas?.find((row) => row.number === number);
      if (!mine || JSON.stringify(mine) === JSON.stringify(known.replica)) return;
      known.replica = mine;
      part.soon();
    },
    poll: part.now,
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

replicaPage();
