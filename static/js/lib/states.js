// How a state looks: the browser's copy of dashboard/presentation/badges.py; a test compares the two.

export const LOOKS = {
  draft: ["draft", "queued"],
  queued: ["queued", "queued"],
  provisioning: ["provisioning", "provisioning"],
  running: ["running", "running"],
  degraded: ["degraded", "warning"],
  stalled: ["stalled", "warning"],
  pausing: ["paused", "queued"],
  paused: ["paused", "queued"],
  stopping: ["stopping", "warning"],
  succeeded: ["succeeded", "succeeded"],
  failed: ["failed", "failed"],
  cancelled: ["cancelled", "queued"],
  pending: ["queued", "queued"],
  syncing: ["syncing", "provisioning"],
  computing: ["computing", "running"],
  uploading: ["uploading", "running"],
  waiting: ["stalled", "queued"],
  applying: ["applying", "running"],
  suspect: ["suspect", "warning"],
  lost: ["lost", "failed"],
  restarting: ["restarting", "provisioning"],
  draining: ["draining", "warning"],
  evicted: ["evicted", "failed"],
  done: ["succeeded", "succeeded"],
  collecting: ["collecting", "running"],
  planned: ["planned", "running"],
  committed: ["succeeded", "succeeded"],
  void: ["void", "warning"],
  timed_out: ["queued", "warning"],
  uploaded: ["uploading", "running"],
  included: ["included", "succeeded"],
  late: ["late", "warning"],
  refused: ["refused", "failed"],
  missing: ["missing", "queued"],
  healing: ["syncing", "provisioning"],
};

export const RUN_ENDED = new Set(["succeeded", "failed", "cancelled"]);
export const RUN_STOPPABLE = new Set([
  "queued", "provisioning", "running", "degraded", "stalled", "pausing", "paused",
]);
export const REPLICA_WORKING = new Set(["syncing", "computing", "uploading", "waiting", "applying"]);
export const REPLICA_ENDED = new Set(["lost", "evicted", "done", "failed"]);

export function look(state) {
  const [icon, tone] = LOOKS[state] ?? ["suspect", "queued"];
  return { icon, tone, word: String(state).replaceAll("_", " ") };
}
