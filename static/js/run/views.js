// The menu of saved views of a run's panels: its forms send the address; the view shown is marked.

import { $, $$ } from "../lib/dom.js";

const LAYOUT = ["panels", "x", "smooth", "log", "clip"];

const layoutOf = (search) => {
  const query = new URLSearchParams(search);
  return LAYOUT.map((name) => query.get(name) ?? "").join(" ");
};

export function viewMenu(place) {
  const menu = $("[data-menu]", place);
  menu.addEventListener("toggle", () => {
    if (!menu.open) return;
    const shown = layoutOf(location.search);
    for (const link of $$("[data-view]", menu)) {
      if (layoutOf(link.search) === shown) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  });
  menu.addEventListener("submit", ({ target }) => {
    target.elements.back.value = location.search;
  });
}
