// A part of a page that the server renders, fetched again when something changed: ?part=1.

import { $, $$ } from "./dom.js";
import { Live, getHTML } from "./live.js";
import { oneAtATime } from "./requests.js";
import { tickTimes } from "./times.js";

const FOCUSABLE = "a, button, summary, time, [tabindex]";
const SCROLLED = "[tabindex][aria-labelledby]";

/** The name by which an element is found after it was replaced. A button is that of its form. */
const nameOf = (element) =>
  element.closest("[data-act]")?.dataset.act ??
  ["href", "datetime", "aria-labelledby"].map((name) => element.getAttribute(name)).find(Boolean) ??
  (element.matches("button, summary")
    ? `${element.form?.getAttribute("action") ?? ""} ${element.textContent.trim()}`
    : undefined);

const folds = (root) =>
  $$("details > summary:first-child", root).map((head) => [nameOf(head), head.parentElement]);

/** Keep the focus, the position of scrolled parts, and what is folded. Nothing is replaced while
 *  text is selected in it, or while a field of a form has the focus. */
export function replace(place, content) {
  const active = document.activeElement;
  const focused = place.contains(active) && active !== place ? active : null;
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
  const open = new Map(folds(place).map(([head, fold]) => [head, fold.open]));
  for (const [head, fold] of folds(content)) fold.open = open.get(head) ?? fold.open;
  place.replaceChildren(content);
  for (const part of $$(SCROLLED, place)) part.scrollTo(...(positions.get(nameOf(part)) ?? [0, 0]));
  if (focused) same()[index]?.focus({ preventScroll: true });
  tickTimes(place);
}

/** Refresh `place`: `now()` at once, or after a refresh under way, whose answer can be older than
 *  the caller; `soon()` at most every `everyMs`.
 *  `onContent` gets each fetched part, also one that is not shown. */
export function refreshed(place, everyMs, onContent = () => {}) {
  let timer = 0;
  let last = 0;

  const now = oneAtATime(async () => {
    try {
      const query = new URLSearchParams(location.search);
      query.set("part", "1");
      const made = document.createElement("template");
      made.innerHTML = await getHTML(`?${query}`);
      onContent(made.content);
      replace(place, made.content);
    } finally {
      last = Date.now();
    }
  });

  function soon() {
    timer ||= setTimeout(
      () => {
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
    onDelta: part.soon,
    poll: part.now,
  }).start();
}
