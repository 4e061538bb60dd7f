// Tabs rendered by the server: fetched while they are open and can have changed.

import { $, $$, setText } from "../lib/dom.js";
import { getHTML } from "../lib/live.js";

/** `place` shows the fragment at `address`, for the state `key()`; then `drawn()` is called. */
function written({ store, page }, place, address, key, drawn = () => {}) {
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
      drawn();
    } catch {
      return; // The next change, or opening the tab, fetches again.
    } finally {
      asking = false;
    }
    update(); // it can have changed since the request
  }

  const update = () => page.dataset.tab === panel && shown !== key() && refresh();
  place.addEventListener("focusout", () =>
    setTimeout(() => store.run && shown !== key() && refresh()),
  );
  return update;
}

export function checkpointList(context, place) {
  const { store } = context;
  const key = () => [store.run.state, store.run.committed_rounds, store.events.size].join();
  const refresh = written(context, place, place.dataset.refresh, key);
  return () => store.run && refresh();
}

/** The Evaluations tab. Charts of new series are added to its board. */
export function evaluationList(context, panel) {
  const { store } = context;
  const charts = $("[data-evaluation-charts]", panel);
  const list = $("[data-evaluation-list]", panel);
  const template = $("[data-plot-template]", panel).content.firstElementChild;

  function addCharts() {
    const known = new Set($$("[data-plot]", charts).map((card) => card.dataset.plot));
    for (const { dataset } of $$("[data-series]", list)) {
      if (known.has(dataset.series)) continue;
      const card = template.cloneNode(true);
      const heading = $("h2", card);
      card.dataset.plot = dataset.series;
      heading.id = `h-${dataset.series}`;
      card.setAttribute("aria-labelledby", heading.id);
      setText(heading, dataset.title);
      const label = `${dataset.title}. Left and right arrows read the points.`;
      $("[data-chart]", card).setAttribute("aria-label", label);
      $("[data-plots]", charts).append(card);
      charts.hidden = false;
      card.dispatchEvent(new Event("plot-added", { bubbles: true }));
    }
  }

  const key = () => [store.run.state, store.run.committed_rounds, store.events.size].join();
  const refresh = written(context, list, panel.dataset.evaluations, key, addCharts);
  return () => store.run && refresh();
}
