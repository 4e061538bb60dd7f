// The one way to show a time: <time datetime="..." data-age>, with data-clock or data-left instead
// of data-age for another text. The absolute time with its zone is the title, which `tooltip` shows
// on keyboard focus. The server writes the same elements (dashboard/templatetags/ui.py).

import { $$, h, setText } from "./dom.js";
import { age, clock, duration, secondsSince, UNKNOWN, when } from "./format.js";

export function left(iso) {
  const seconds = (Date.parse(iso) - Date.now()) / 1000;
  return seconds > 0 ? `${duration(Math.floor(seconds))} left` : "passed";
}

const FORMS = { age: (iso) => age(secondsSince(iso)), clock, left };

/** The element for a time (ISO 8601 or milliseconds); `form` is a name in FORMS. */
export function timeElement(at, form = "age") {
  const date = new Date(at ?? NaN);
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  const time = h("time", { datetime: date.toISOString(), dataset: { [form]: "" } });
  show(time, FORMS[form]);
  return time;
}

function show(time, text) {
  if (Number.isNaN(Date.parse(time.dateTime))) return setText(time, UNKNOWN);
  setText(time, text(time.dateTime));
  const title = when(time.dateTime);
  if (time.title !== title) time.title = title;
}

export function tickTimes(root = document) {
  for (const [form, text] of Object.entries(FORMS)) {
    for (const time of $$(`time[data-${form}]`, root)) show(time, text);
  }
}

/** Shows the title of a time that has the keyboard focus, or is in the link that has it. */
export function tooltip() {
  const tip = h("div.tooltip", { popover: "manual", role: "tooltip" });
  document.body.append(tip);
  document.addEventListener("focusin", ({ target }) => {
    const time = target.matches("time") ? target : target.querySelector("time");
    if (!time?.title || !target.matches("time, a, button") || !target.matches(":focus-visible"))
      return;
    setText(tip, time.title);
    tip.showPopover();
    const { left: x, bottom, top } = time.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8))}px`;
    const below = bottom + tip.offsetHeight + 8 < innerHeight;
    tip.style.top = `${below ? bottom + 6 : top - tip.offsetHeight - 6}px`;
  });
  const hide = () => tip.matches(":popover-open") && tip.hidePopover();
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", ({ key }) => key === "Escape" && hide());
  addEventListener("scroll", hide, { capture: true, passive: true });
}
