// The failure card, rendered by the server: fetched when the run fails, and again when its last
// telemetry arrives.

import { getHTML } from "../lib/live.js";

export function failureCard({ store }, place) {
  const key = () =>
    store.run.state === "failed" ? `${store.run.state_since} ${store.run.last_seen_at}` : "";
  let shown = null;
  return async (changed) => {
    if (!changed.has("run") || shown === key()) return;
    const isFirst = shown === null && place.childElementCount > 0; // the page has the card
    const wanted = key();
    shown = wanted;
    if (!wanted) place.replaceChildren();
    if (!wanted || isFirst || place.contains(document.activeElement)) return;
    try {
      const html = await getHTML("?part=failure");
      if (shown === wanted) place.innerHTML = html; // else it failed again, or was resumed
    } catch {
      if (shown === wanted) shown = null; // the next change fetches again
    }
  };
}
