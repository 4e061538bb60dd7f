// The Activity tab: events and alerts in one list, filtered by the server. The list is fetched
// again while the tab is open and something can have changed, but not while it is in use.

import { $, url } from "../lib/dom.js";
import { isEdited } from "../lib/forms.js";
import { getHTML } from "../lib/live.js";
import { tickTimes } from "../lib/times.js";

const FILTERS = ["source", "level", "replica", "text"];
const TYPING_MS = 250;

export function activityList({ store, page }, place) {
  const form = $("[data-activity-form]", page);
  let shown = null;
  let question = 0;
  let timer = 0;
  const key = () =>
    [store.run.alerts, store.run.state, store.events.size, store.eventRows()[0]?.id].join();
  const inUse = () => place.contains(document.activeElement);
  const values = () =>
    Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value.trim()]));

  async function refresh({ forced = false } = {}) {
    if (page.dataset.tab !== "activity" || (!forced && (inUse() || url.get("before")))) return;
    const wanted = store.run && key();
    if (!forced && wanted === shown) return;
    const current = ++question;
    const query = new URLSearchParams(Object.entries(values()).filter(([, value]) => value));
    try {
      const html = await getHTML(`${place.dataset.activity}?${query}`);
      if (current !== question || (!forced && inUse())) return;
      place.innerHTML = html;
      tickTimes(place);
      shown = wanted;
    } catch {
      // the next change, or opening the tab, fetches again
    }
  }

  function filter() {
    if (!form.reportValidity()) return;
    url.set({ ...values(), before: null });
    refresh({ forced: true });
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    filter();
  });
  form.addEventListener("change", filter);
  form.addEventListener("input", (event) => {
    if (event.target.type !== "search") return;
    clearTimeout(timer);
    timer = setTimeout(filter, TYPING_MS);
  });
  place.addEventListener("focusout", () => setTimeout(() => store.run && refresh()));
  if (page.dataset.tab === "activity") {
    // A filter that was set or cleared while this script was loaded applies.
    const edited = FILTERS.filter((name) => isEdited(form.elements[name]));
    for (const name of FILTERS)
      if (!edited.includes(name)) form.elements[name].value = url.get(name) ?? "";
    if (edited.length) filter();
  }

  return (changed) => {
    if (!store.run || !["run", "events", "tab"].some((part) => changed.has(part))) return;
    refresh();
  };
}
