// Behaviour of every page: relative times, progress bars, menus, dialogs and keyboard shortcuts.

import { bell } from "./lib/bell.js";
import { $, $$, h, press, setFraction } from "./lib/dom.js";
import { keys } from "./lib/keys.js";
import { palette } from "./lib/palette_dialog.js";
import { tickTimes, tooltip } from "./lib/times.js";

tickTimes();
setInterval(tickTimes, 1000);
tooltip();
bell();
palette();

for (const bar of $$("[data-fraction]")) setFraction(bar, Number(bar.dataset.fraction));

for (const menu of $$("[data-menu]")) {
  document.addEventListener("click", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

for (const form of $$("[data-theme-form]")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { value } = event.submitter;
    if (value === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = value;
    for (const button of $$("button", form)) press(button, button === event.submitter);
    fetch(form.action, {
      method: "POST",
      body: new FormData(form, event.submitter),
      redirect: "manual",
    });
  });
}

// A dialog closes with its button or with a click outside it.
document.addEventListener("click", ({ target }) => {
  const dialog = target.closest("dialog");
  if (dialog && (target === dialog || target.closest("[data-close]"))) dialog.close();
});

// ? lists the shortcuts, / focuses the search field, [ and ] switch tabs.

const help = $("[data-help-dialog]");
for (const button of $$("[data-help]")) button.addEventListener("click", () => help.showModal());

keys((key) => {
  if (key === "?") help.showModal();
  else if (key === "/") {
    const box = $$("input[type=search]").find((input) => input.offsetParent);
    if (box) box.select();
    else if (help.dataset.search) location.assign(help.dataset.search);
    else return false;
  } else if (key === "[" || key === "]") {
    const tabs = $$(".tabs a");
    const at = tabs.findIndex((tab) => tab.hasAttribute("aria-current"));
    if (at < 0) return false;
    tabs.at((at + (key === "]" ? 1 : -1)) % tabs.length).click();
  } else return false;
  return true;
});
if (location.hash === "#q") $("#q")?.focus();

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API needs a secure context; plain http falls back to execCommand.
    const area = h("textarea.visually-hidden", {}, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.querySelector("[data-copied]");
  if (!label) return;
  const before = label.textContent;
  label.textContent = "Copied";
  setTimeout(() => (label.textContent = before), 1500);
});

// The values of the submit form are kept only while the user signs in.
if ($(".topbar") && !$("[data-submit]")) sessionStorage.removeItem("submit");
