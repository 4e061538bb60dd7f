// Server times in the browser's time zone: as clock time or as remaining time.

import { $$, setText } from "./dom.js";
import { duration, MINUTES, SECONDS, secondsSince, when } from "./format.js";

export function left(iso) {
  const seconds = (Date.parse(iso) - Date.now()) / 1000;
  return seconds > 0 ? `${duration(Math.floor(seconds))} left` : "passed";
}

export function tickTimes(root = document) {
  for (const time of $$("time[data-clock]:not([title])", root)) {
    time.title = when(time.dateTime);
    const today = secondsSince(time.dateTime) < 86_400;
    const shown = today ? SECONDS : { month: "short", day: "numeric", ...MINUTES };
    setText(time, new Date(time.dateTime).toLocaleString([], shown));
  }
  for (const time of $$("time[data-left]", root)) {
    setText(time, left(time.dateTime));
    if (!time.title) time.title = when(time.dateTime);
  }
}
