// Tabs that the server writes (alerts, checkpoints): asked for when they are open and what they show
// may have changed.

import { $, setText } from "../lib/dom.js";
import { getHTML } from "../lib/live.js";

/** What `place` shows is of `address`, and of `key()`. */
function written({ store, page }, place, address, key) {
  const { panel } = place.closest("[data-panel]").dataset;
  let shown = null;
  let asking = false;

  // Nothing moves under somebody's fingers: what is new comes when they have left the list.
  const inUse = () => place.contains(document.activeElement) || $("details[open]", place);

  async function refresh() {
    if (asking || inUse()) return;
    asking = true;
    const wanted = key();
    try {
      const html = await getHTML(address);
      if (inUse()) return; // while it was on its way
      place.innerHTML = html;
      shown = wanted;
    } catch {
      // The next change, or the next look at the tab, asks again.
    } finally {
      asking = false;
    }
  }

  place.addEventListener("focusout", () => setTimeout(() => store.run && shown !== key() && refresh()));
  return () => page.dataset.tab === panel && shown !== key() && refresh();
}

export function checkpointList(context, place) {
  const { store } = context;
  const refresh = written(context, place, place.dataset.refresh, () => `${store.run.state} ${store.run.committed_rounds} ${store.events.size}`);
  return () => store.run && refresh();
}

export function alertList(context, place) {
  const { store, page } = context;
  const badge = $("[data-alert-count]", page);
  const link = badge.closest("a");
  const refresh = written(context, place, place.dataset.alerts, () => `${store.run.alerts} ${store.run.state} ${store.run.committed_rounds}`);
  return (changed) => {
    if (!store.run || !(changed.has("run") || changed.has("tab"))) return;
    const count = store.run.alerts ?? 0;
    badge.hidden = count === 0;
    setText($("[data-n]", badge), String(count));
    link.title = count ? `${count} nobody has acknowledged` : "";
    refresh();
  };
}
