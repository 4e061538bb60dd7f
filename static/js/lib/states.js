// Icon and tone of each state, and groups of states.

import LOOKS from "./looks.json" with { type: "json" };

export const RUN_ENDED = new Set(["succeeded", "failed", "cancelled"]);
export const RUN_STOPPABLE = new Set([
  "queued",
  "provisioning",
  "running",
  "degraded",
  "stalled",
  "pausing",
  "paused",
]);
export const REPLICA_WORKING = new Set([
  "syncing",
  "computing",
  "uploading",
  "waiting",
  "applying",
]);
export const REPLICA_ENDED = new Set(["lost", "evicted", "done", "failed"]);

export function look(state) {
  const [icon, tone] = LOOKS[state] ?? ["suspect", "queued"];
  return { icon, tone, word: String(state).replaceAll("_", " ") };
}
