// A sweep. The server renders the ranking; it is fetched again when the stream reports a change of
// any run.

import "./base.js";
import { $ } from "./lib/dom.js";
import { followList, refreshed } from "./lib/part.js";

const EVERY_MS = 3000;

function sweepPage() {
  const page = $("[data-sweep-page]");
  const part = refreshed($("[data-part]", page), EVERY_MS);
  page.addEventListener("change", (event) => event.target.closest("[data-rank]")?.submit());
  followList(page.dataset.stream, part);
}

sweepPage();
