// Times that the server wrote, in the reader's own zone: by the clock, or what is left until then.

import { $$, setText } from "./dom.js";
import { duration, secondsSince, when } from "./format.js";

export function left(iso) {
  const seconds = (Date.parse(iso) - Date.now()) / 1000;
  return seconds > 0 ? `${duration(Math.floor(seconds))} left` : "over";
}

export function tickTimes(root = document) {
  for (const time of $$("time[data-clock]:not([title])", root)) {
    time.title = when(time.dateTime);
    const today = secondsSince(time.dateTime) < 86_400;
    setText(time, new Date(time.dateTime).toLocaleString([], today
      ? { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" }
      : { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" }));
  }
  for (const time of $$("time[data-left]", root)) {
    setText(time, left(time.dateTime));
    if (!time.title) time.title = when(time.dateTime);
  }
}
