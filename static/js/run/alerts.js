// Alerts: the server writes the list; it is asked for when their number changes and the tab is open.

import { $, setText } from "../lib/dom.js";
import { getHTML } from "../lib/live.js";

export function alertList({ store, page }, place) {
  const badge = $("[data-alert-count]", page);
  const link = badge.closest("a");
  let shown = null;
  let asking = false;

  async function refresh() {
    // Nothing moves under somebody's fingers: what is new comes when they have left the list.
    if (asking || place.contains(document.activeElement)) return;
    asking = true;
    const wanted = key();
    try {
      place.innerHTML = await getHTML(place.dataset.alerts);
      shown = wanted;
    } catch {
      // The next change, or the next look at the tab, asks again.
    } finally {
      asking = false;
    }
  }

  const key = () => `${store.run.alerts} ${store.run.state} ${store.run.committed_rounds}`;
  place.addEventListener("focusout", () => setTimeout(() => store.run && shown !== key() && refresh()));
  return (changed) => {
    if (!store.run || !(changed.has("run") || changed.has("tab"))) return;
    const count = store.run.alerts ?? 0;
    badge.hidden = count === 0;
    setText($("[data-n]", badge), String(count));
    link.title = count ? `${count} nobody has acknowledged` : "";
    if (page.dataset.tab === "alerts" && shown !== key()) refresh();
  };
}
