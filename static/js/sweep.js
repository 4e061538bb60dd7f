// A sweep. The server renders the ranking; it is fetched again when the stream reports a change of
// any run.

import "./base.js";
import { $ } from "./lib/dom.js";
import { Live } from "./lib/live.js";
import { refreshed } from "./lib/part.js";

const EVERY_MS = 3000;

function sweepPage() {
  const page = $("[data-sweep-page]");
  const part = refreshed($("[data-part]", page), EVERY_MS);
  page.addEventListener("change", (event) => event.target.closest("[data-rank]")?.submit());
  new Live({
    dot: $("[data-conn]"),
    stream: page.dataset.stream,
    topic: "list",
    after: () => "",
    onDelta: part.soon,
    poll: part.now,
  }).start();
}

sweepPage();
