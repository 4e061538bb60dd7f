// Tabs are links to ?tab=..., which work without JavaScript; here they switch without a reload.

import { $$, url } from "../lib/dom.js";

export function tabs({ page }, onShow) {
  const links = $$("[data-tab-link]", page);
  const tabLinks = links.filter((link) => link.closest(".tabs"));
  const panels = $$("[data-panel]", page);

  function show(name, { push = false } = {}) {
    if (!panels.some((panel) => panel.dataset.panel === name)) name = "overview";
    page.dataset.tab = name;
    for (const panel of panels) panel.hidden = panel.dataset.panel !== name;
    for (const link of tabLinks) {
      if (link.dataset.tabLink === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    reveal();
    url.set({ tab: name === "overview" ? null : name }, { push });
    onShow(name);
  }

  /** On a narrow screen the tab row scrolls; keep the current tab visible. */
  function reveal() {
    const row = page.querySelector(".tabs");
    const current = row.querySelector("[aria-current]");
    row.scrollLeft =
      current.offsetLeft - row.offsetLeft - (row.clientWidth - current.offsetWidth) / 2;
  }

  reveal();
  for (const link of links) {
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      const name = link.dataset.tabLink;
      show(name, { push: true });
      if (!link.closest(".tabs")) tabLinks.find((tab) => tab.dataset.tabLink === name)?.focus();
    });
  }
  addEventListener("popstate", () => show(url.get("tab") ?? "overview"));
  return { show };
}
