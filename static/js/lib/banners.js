// Banners for stale data: no worker is running, or training runs have sent no data for a while.
// The server renders both; this module shows and hides them.

import { secondsSince } from "./format.js";
import { $, setText } from "./dom.js";

const silent = $("[data-banner=silent]");
const stale = $("[data-banner=stale]");
const LIVE = new Set(["running", "degraded", "stalled"]);

/** Time of the last worker heartbeat: "" if unknown, null while a worker is running. */
export function showSilent(since) {
  if (!silent || since === undefined) return;
  silent.hidden = since === null;
  const time = $("time", silent);
  time.parentElement.hidden = !since;
  if (since) time.dateTime = since;
}

export const isWorkerSilent = () => Boolean(silent && !silent.hidden);

/** Seconds since the newest data of a training run, 0 if unknown. */
const dataAge = (run) => (LIVE.has(run.state) && secondsSince(run.last_seen_at)) || 0;

export const isStale = (run) => Boolean(stale && dataAge(run) > stale.dataset.after);

/** Whether data of that time are out of date. */
export const isOld = (iso) => Boolean(stale && secondsSince(iso) > stale.dataset.after);

/** Age of the newest data of a training run if more is overdue, otherwise 0. */
export const lateness = (run) => (dataAge(run) > stale?.dataset.lateAfter ? dataAge(run) : 0);

/** Show the banner for `count` runs; `text` is the number or, on the page of a run, the age. */
export function showStale(count, text = String(count)) {
  if (!stale) return;
  stale.hidden = !count || !silent.hidden;
  setText($("[data-n]", stale), text);
}
