// Events, newest first. While the list is in use (hovered, focused or scrolled), new events wait
// behind a button.

import * as format from "../lib/format.js";
import { firstLine, h, icon, keyed } from "../lib/dom.js";
import { look } from "../lib/states.js";
import { timeElement } from "../lib/times.js";

const ICON = { info: "info", warning: "degraded", error: "failed" };

export function eventList({ store }, place) {
  const limit = Number(place.dataset.events);
  const more = h("button.events-new", { type: "button", onclick: () => show(true) });
  more.hidden = true;
  const list = h("ol.events");
  const empty = h("p.empty-s", {}, "No events yet.");
  place.append(more, list, empty);
  let newest = 0;

  const reading = () =>
    place.matches(":hover") || place.contains(document.activeElement) || place.scrollTop > 0;

  function show(force = false) {
    const rows = store.eventRows().slice(0, limit);
    empty.hidden = rows.length > 0;
    const waiting = newest ? rows.filter((row) => row.id > newest).length : 0;
    if (waiting && !force && reading()) {
      more.textContent = `${waiting} new`;
      more.hidden = false;
      return;
    }
    more.hidden = true;
    newest = rows[0]?.id ?? 0;
    keyed(list, rows, (row) => row.id, (row) => make(row, "short" in place.dataset), () => {});
    if (force) place.scrollTop = 0;
  }

  place.addEventListener("mouseleave", () => !more.hidden && !reading() && show());
  return (changed) => {
    if (changed.has("events")) show();
  };
}

/** `short`: only the first line of the message. */
function make(event, short) {
  const who = [event.replica === null ? null : `replica ${event.replica}`, event.actor]
    .filter(Boolean)
    .join(" · ");
  const to = event.to_state ? look(event.to_state).word : "";
  const message = short ? firstLine(event.message) : event.message;
  const title = message || to;
  const move =
    to && event.from_state ? `${look(event.from_state).word} → ${to}` : event.message && to;
  return h(
    "li",
    { dataset: { level: event.level } },
    icon(event.to_state ? look(event.to_state).icon : (ICON[event.level] ?? "info")),
    h(
      "div.what",
      {},
      h(
        "a.event-link",
        { href: `?drawer=event-${event.id}`, dataset: { drawerLink: `event-${event.id}` } },
        event.level === "info" ? null : h("b", {}, `${event.level}: `),
        title,
      ),
      who || move ? h("div.move", {}, [who, move].filter(Boolean).join(" · ")) : null,
    ),
    timeElement(event.at),
  );
}
