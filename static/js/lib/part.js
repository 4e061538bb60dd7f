// A part of a page that the server renders, fetched again when something changed: ?part=1.

import { $, $$ } from "./dom.js";
import { getHTML } from "./live.js";
import { tickTimes } from "./times.js";

/** Keep the focus on the link with the same address, and the position of a scrolled table. */
function replace(place, html) {
  if (!getSelection().isCollapsed && place.contains(getSelection().anchorNode)) return;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  const same = () => $$("a", place).filter((link) => link.getAttribute("href") === target);
  const target = focused?.getAttribute("href");
  const index = target ? same().indexOf(focused) : -1;
  const left = $("[data-scroll]", place)?.scrollLeft;
  const made = document.createElement("template");
  made.innerHTML = html;
  place.replaceChildren(made.content);
  if (left) $("[data-scroll]", place)?.scrollTo(left, 0);
  if (target) same()[index]?.focus({ preventScroll: true });
  tickTimes(place);
}

/** Refresh `place`: `now()` at once, `soon()` at most every `everyMs`. Requests never overlap. */
export function refreshed(place, everyMs) {
  let running = null;
  let timer = 0;
  let last = Date.now();

  function now() {
    running ??= (async () => {
      try {
        const query = new URLSearchParams(location.search);
        query.set("part", "1");
        replace(place, await getHTML(`?${query}`));
      } finally {
        last = Date.now();
        running = null;
      }
    })();
    return running;
  }

  function soon() {
    timer ||= setTimeout(() => {
      timer = 0;
      now().catch(() => {}); // tried again at the next change; the connection indicator shows the state
    }, Math.max(0, last + everyMs - Date.now()));
  }
  return { now, soon };
}
