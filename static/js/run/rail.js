// The left rail: findings, replicas as dots, notes. It can be closed, which a cookie remembers, so
// that the server renders the page in the right width.

import { $, h, keyed, setText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { getHTML } from "../lib/live.js";
import { inOrder } from "../lib/requests.js";
import { look } from "../lib/states.js";

const COOKIE = "run-rail";
const YEAR_S = 365 * 86_400;
const AGAIN_MS = 10_000; // minimum interval between requests for the findings
const ROWS = 24; // more replicas are shown as dots alone, as by dashboard/views/run.py

export function rail({ store, page }) {
  const toggle = $("[data-rail-toggle]", page);
  toggle.addEventListener("click", () => {
    const closed = page.toggleAttribute("data-rail-closed");
    toggle.setAttribute("aria-expanded", String(!closed));
    const [value, age] = closed ? ["closed", YEAR_S] : ["", 0];
    document.cookie = `${COOKIE}=${value}; path=/runs/; max-age=${age}; samesite=lax`;
    dispatchEvent(new Event("resize"));
  });
  const list = $("[data-rail-replicas]", page);
  let isFromServer = true; // its rows have the size of those below, but not their content
  const findings = refreshed($("[data-findings]", page));
  return (changed) => {
    if (!store.run) return;
    if (changed.has("replicas")) {
      if (isFromServer) list.replaceChildren();
      isFromServer = false;
      dots(list, store.replicaRows());
    }
    if (changed.has("replicas") || changed.has("run") || changed.has("rounds")) findings();
  };
}

/** Request the fragment at most every AGAIN_MS, and not while it has the focus. */
function refreshed(place) {
  let asked = -Infinity;
  let timer = 0;
  const fetched = inOrder(() => getHTML(place.dataset.findings));
  async function ask() {
    timer = 0;
    asked = performance.now();
    try {
      const html = await fetched();
      if (html !== undefined && !place.contains(document.activeElement) && html !== place.innerHTML)
        place.innerHTML = html;
    } catch {
      // the connection indicator shows the state
    }
  }
  return () => {
    timer ||= setTimeout(ask, Math.max(0, asked + AGAIN_MS - performance.now()));
  };
}

function dots(list, rows) {
  const dense = rows.length > ROWS;
  list.toggleAttribute("data-dense", dense);
  keyed(list, rows, (row) => row.number, make, (item, row) => {
    const { tone, word } = look(row.state);
    const link = item.firstElementChild;
    link.dataset.tone = tone;
    link.title = `Replica ${row.number}: ${word}${row.state_reason ? `, ${row.state_reason}` : ""}`;
    setText(link.children[1], dense ? "" : String(row.number));
    setText(link.children[2], dense ? `Replica ${row.number}, ${word}` : word);
    link.children[2].className = dense ? "visually-hidden" : "";
    setText(link.children[3], dense || row.loss === null ? "" : format.loss(row.loss));
  });
}

function make({ number }) {
  const link = h(
    "a",
    { href: `?drawer=replica-${number}`, dataset: { drawerLink: `replica-${number}` } },
    h("i", { "aria-hidden": "true" }),
    h("b"),
    h("span"),
    h("output"),
  );
  return h("li", {}, link);
}
