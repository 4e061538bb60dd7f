// A part of a page that the server renders, fetched again when something changed: ?part=1.

import { $, $$ } from "./dom.js";
import { Live, getHTML } from "./live.js";
import { tickTimes } from "./times.js";

const FOCUSABLE = "a, time, [tabindex], [data-act] button";
const SCROLLED = "[tabindex][aria-labelledby]";

/** The name by which a link, a time, a scrolled part or a button is found after it was replaced. */
const nameOf = (element) =>
  element.closest("[data-act]")?.dataset.act ??
  ["href", "datetime", "aria-labelledby"].map((name) => element.getAttribute(name)).find(Boolean);

/** Keep the focus, and the position of scrolled parts. Nothing is replaced while text is selected
 *  in it, or while something else in it has the focus. */
function replace(place, content) {
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const name = focused && nameOf(focused);
  const same = () => $$(FOCUSABLE, place).filter((element) => nameOf(element) === name);
  if (
    (focused && !name) ||
    (!getSelection().isCollapsed && place.contains(getSelection().anchorNode))
  )
    return;
  const index = same().indexOf(focused);
  const positions = new Map(
    $$(SCROLLED, place).map((part) => [nameOf(part), [part.scrollLeft, part.scrollTop]]),
  );
  place.replaceChildren(content);
  for (const part of $$(SCROLLED, place)) part.scrollTo(...(positions.get(nameOf(part)) ?? [0, 0]));
  if (focused) same()[index]?.focus({ preventScroll: true });
  tickTimes(place);
}

/** Refresh `place`: `now()` at once, `soon()` at most every `everyMs`. Requests never overlap.
 *  `onContent` gets each fetched part, also one that is not shown. */
export function refreshed(place, everyMs, onContent = () => {}) {
  let running = null;
  let timer = 0;
  let last = 0;

  function now() {
    running ??= (async () => {
      try {
        const query = new URLSearchParams(location.search);
        query.set("part", "1");
        const made = document.createElement("template");
        made.innerHTML = await getHTML(`?${query}`);
        onContent(made.content);
        replace(place, made.content);
      } finally {
        last = Date.now();
        running = null;
      }
    })();
    return running;
  }

  function soon() {
    timer ||= setTimeout(
      async () => {
        await running?.catch(() => {}); // its answer can be older than the change
        timer = 0;
        now().catch(() => {}); // the connection indicator shows the state
      },
      Math.max(0, last + everyMs - Date.now()),
    );
  }
  return { now, soon };
}

/** Refresh `part` when a run of the list changes, and while the stream is away. */
export function followList(stream, part) {
  new Live({
    dot: $("[data-conn]"),
    stream,
    topic: "list",
    after: () => "",
    onDelta: part.soon,
    poll: part.now,
  }).start();
}
