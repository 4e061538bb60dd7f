// The dialog to stop or restart a replica, with the consequences.

import * as format from "../lib/format.js";
import { $, setText } from "../lib/dom.js";
import { REPLICA_WORKING } from "../lib/states.js";

const TITLE = { stop: "Stop replica", restart: "Restart replica" };

/** `run` and `replicas` of the store; either can still be unknown. */
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
  if (what === "restart") {
    return "Its job is cancelled and the replica is launched again as a new attempt. " +
      "Earlier failures are no longer counted.";
  }
  if (!run || !replica) return "It stays stopped until an operator restarts it.";
  const live = run.live - (REPLICA_WORKING.has(replica.state) ? 1 : 0);
  if (live < run.quorum)
    return `Live ${live} < quorum ${run.quorum}: the run will stall until other replicas join.`;
  return (
    `${format.plural(live, "replica")} remain, with a quorum of ${run.quorum}: the run ` +
    "continues. " +
    "The replica stays stopped until an operator restarts it."
  );
}
