// What is said above a page when what it shows is old: no worker is at work, or runs that train
// have sent nothing for long. The server renders both; here they come and go.

import { secondsSince } from "./format.js";
import { $, setText } from "./dom.js";

const silent = $("[data-banner=silent]");
const stale = $("[data-banner=stale]");
const LIVE = new Set(["running", "degraded", "stalled"]);

/** A worker was last heard of then: "" if nobody knows when, null while one is at work. */
export function showSilent(since) {
  if (!silent || since === undefined) return;
  silent.hidden = since === null;
  const time = $("time", silent);
  time.parentElement.hidden = !since;
  if (since) time.dateTime = since;
}

export const isStale = (run) =>
  Boolean(stale && LIVE.has(run.state) && run.last_seen_at && secondsSince(run.last_seen_at) > stale.dataset.after);

export function showStale(count) {
  if (!stale) return;
  stale.hidden = !count || !silent.hidden;
  setText($("[data-n]", stale), String(count));
}
