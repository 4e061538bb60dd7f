// Spending. The server renders the sums and draws the chart; they are fetched again when the live
// stream reports a change of any run, but rarely: costs are stored every few seconds.

import "./base.js";
import { $, $$, setFraction } from "./lib/dom.js";
import { followList, refreshed } from "./lib/part.js";

const EVERY_MS = 15_000;

function spendPage() {
  const page = $("[data-spend]");
  const part = refreshed($("[data-part]", page), EVERY_MS, (content) => {
    for (const bar of $$("[data-fraction]", content))
      setFraction(bar, Number(bar.dataset.fraction));
  });
  followList(page.dataset.stream, part);
}

spendPage();
