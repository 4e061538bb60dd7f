// The Checkpoints tab, rendered by the server: fetched while it is open and can have changed.

import { $ } from "../lib/dom.js";
import { getHTML } from "../lib/live.js";

/** `place` shows the fragment at `address`, for the state `key()`. */
function written({ store, page }, place, address, key) {
  const { panel } = place.closest("[data-panel]").dataset;
  let shown = null;
  let asking = false;

  // Do not replace the list while it is in use; update it afterwards.
  const inUse = () => place.contains(document.activeElement) || $("details[open]", place);

  async function refresh() {
    if (asking || inUse()) return;
    asking = true;
    const wanted = key();
    try {
      const html = await getHTML(address);
      if (inUse()) return; // in use since the request
      place.innerHTML = html;
      shown = wanted;
    } catch {
      // The next change, or opening the tab, fetches again.
    } finally {
      asking = false;
    }
  }

  place.addEventListener("focusout", () =>
    setTimeout(() => store.run && shown !== key() && refresh()),
  );
  return () => page.dataset.tab === panel && shown !== key() && refresh();
}

export function checkpointList(context, place) {
  const { store } = context;
  const key = () => [store.run.state, store.run.committed_rounds, store.events.size].join();
  const refresh = written(context, place, place.dataset.refresh, key);
  return () => store.run && refresh();
}
