// The fleet. The server renders jobs, sums and trouble; they are fetched again when the live stream
// reports a change of any run, and now and then, because not every change of a job is in the list's
// stream.

import "./base.js";
import { $, $$ } from "./lib/dom.js";
import { followList, refreshed } from "./lib/part.js";

const EVERY_MS = 3000;
const AT_LEAST_MS = 20_000;

function fleetPage() {
  const page = $("[data-fleet]");
  const part = refreshed($("[data-part]", page), EVERY_MS);
  const filters = $("[data-filters]", page);
  $("button", filters).hidden = true;
  for (const select of $$("select", filters)) {
    select.addEventListener("change", () => {
      const chosen = [...new FormData(filters)].filter(([, value]) => value);
      location.assign(`${location.pathname}?${new URLSearchParams(chosen)}`);
    });
  }
  setInterval(() => document.hidden || part.soon(), AT_LEAST_MS);
  followList(page.dataset.stream, part);
}

fleetPage();
