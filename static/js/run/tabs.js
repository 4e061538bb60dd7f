// Tabs are links to ?tab=..., so they work without this; here they switch without a reload.

import { $$, url } from "../lib/dom.js";

export function tabs({ page }, onShow) {
  const links = $$("[data-tab-link]", page);
  const panels = $$("[data-panel]", page);

  function show(name, { push = false } = {}) {
    if (!panels.some((panel) => panel.dataset.panel === name)) name = "overview";
    page.dataset.tab = name;
    for (const panel of panels) panel.hidden = panel.dataset.panel !== name;
    for (const link of links) {
      if (!link.closest(".tabs")) continue;
      if (link.dataset.tabLink === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    reveal();
    url.set({ tab: name === "overview" ? null : name }, { push });
    onShow(name);
  }

  /** On a narrow screen the row of tabs scrolls; the current one must be seen. */
  function reveal() {
    const row = page.querySelector(".tabs");
    const current = row.querySelector("[aria-current]");
    row.scrollLeft = current.offsetLeft - row.offsetLeft - (row.clientWidth - current.offsetWidth) / 2;
  }

  reveal();
  for (const link of links) {
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      show(link.dataset.tabLink, { push: true });
      if (!link.closest(".tabs")) links.find((l) => l.closest(".tabs") && l.dataset.tabLink === link.dataset.tabLink)?.focus();
    });
  }
  addEventListener("popstate", () => show(url.get("tab") ?? "overview"));
  return { show };
}
