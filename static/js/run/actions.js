// The dialog in which an operator stops or restarts a replica. It says what will follow.

import * as format from "../lib/format.js";
import { $, setText } from "../lib/dom.js";
import { REPLICA_WORKING } from "../lib/states.js";

const TITLE = { stop: "Stop replica", restart: "Restart replica" };

/** `run` and `replicas` as the store has them; either may not be known yet. */
export function replicaDialog() {
  const dialog = $("[data-replica-dialog]");
  const form = $("[data-replica-form]", dialog);
  const button = $("[data-replica-do]", dialog);
  form.addEventListener("submit", () => button.setAttribute("aria-disabled", "true"));
  return (what, number, action, { run, replica } = {}) => {
    form.action = action;
    form.reset();
    button.removeAttribute("aria-disabled");
    setText($("[data-replica-title]", dialog), `${TITLE[what]} ${number}?`);
    setText($("[data-replica-text]", dialog), follows(what, run, replica));
    setText(button, `${TITLE[what]} ${number}`);
    button.classList.toggle("btn-danger-solid", what === "stop");
    button.classList.toggle("btn-primary", what !== "stop");
    dialog.showModal();
  };
}

function follows(what, run, replica) {
  if (what === "restart") return "Its job is ended and the same identity is launched again as a new attempt. Failures before count no more.";
  if (!run || !replica) return "It leaves for good, until somebody restarts it.";
  const live = run.live - (REPLICA_WORKING.has(replica.state) ? 1 : 0);
  if (live < run.quorum) return `Live ${live} < quorum ${run.quorum}: the run will stall until other replicas are there.`;
  return `${format.plural(live, "replica")} will be left at work, with a quorum of ${run.quorum}: the run goes on. It leaves for good, until somebody restarts it.`;
}
