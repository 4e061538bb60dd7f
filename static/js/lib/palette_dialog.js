// Ctrl-K (Cmd-K on a Mac): a dialog that finds runs, replicas, pages and actions. The server
// searches; without JavaScript the button is a link to the same search as a page. The roles are
// those of the pattern "combobox" of the ARIA authoring practices.

import { $, $$, clamp, h, stateBadge } from "./dom.js";

const WAIT_MS = 90;
const GROUPS = { run: "Runs", replica: "Replicas", page: "Pages", action: "Actions" };

export function palette() {
  const button = $("[data-find]");
  if (!button) return;
  const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
  $("[data-find-key]", button).textContent = isMac ? "\u2318K" : "Ctrl K";
  const run = location.pathname.match(/^\/runs\/([0-9a-f-]{36})\//)?.[1] ?? "";

  const input = h("input.palette-input", {
    type: "text",
    role: "combobox",
    "aria-expanded": "true",
    "aria-controls": "palette-list",
    "aria-autocomplete": "list",
    "aria-label": "Run, replica, page or action",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "Go to a run, replica or page, or enter an action such as stop",
  });
  const list = h("ul.palette-list", {
    id: "palette-list",
    role: "listbox",
    "aria-label": "Results",
  });
  const status = h("p.visually-hidden", { role: "status" });
  const foot = h(
    "p.palette-foot",
    {},
    h("kbd", {}, "\u2191"),
    h("kbd", {}, "\u2193"),
    " select ",
    h("kbd", {}, "Enter"),
    " open ",
    h("kbd", {}, "Esc"),
    " close",
  );
  const dialog = h("dialog.palette", { "aria-label": "Search" }, input, list, status, foot);
  document.body.append(dialog);

  let at = 0;
  let timer = 0;
  let request = null;
  const options = () => $$("[role=option]", list);

  function select(index) {
    const all = options();
    at = clamp(index, 0, Math.max(all.length - 1, 0));
    all.forEach((option, place) => option.setAttribute("aria-selected", String(place === at)));
    const chosen = all[at];
    if (chosen) input.setAttribute("aria-activedescendant", chosen.id);
    else input.removeAttribute("aria-activedescendant");
    chosen?.scrollIntoView({ block: "nearest" });
  }

  function draw(found) {
    const kinds = [...new Set(found.map(({ kind }) => kind))];
    let number = 0;
    list.replaceChildren(
      ...kinds.flatMap((kind) => [
        h("li.palette-group", { role: "presentation" }, GROUPS[kind] ?? kind),
        ...found
          .filter((row) => row.kind === kind)
          .map((row) =>
            h(
              "li",
              {
                role: "option",
                id: `palette-${number++}`,
                dataset: { url: row.url },
                onclick: () => location.assign(row.url),
              },
              h("span.palette-label", {}, row.label),
              h("span.palette-detail", {}, row.detail),
              row.state ? stateBadge(row.state) : null,
            ),
          ),
      ]),
    );
    if (!found.length)
      list.append(h("li.palette-none", { role: "presentation" }, "Nothing matches."));
    status.textContent = found.length === 1 ? "1 result" : `${found.length} results`;
    select(0);
  }

  async function search() {
    request?.abort();
    request = new AbortController();
    const { signal } = request;
    const query = new URLSearchParams({ q: input.value, run });
    try {
      const response = await fetch(`${button.dataset.find}?${query}`, {
        signal,
        headers: { Accept: "application/json" },
      });
      if (response.redirected) location.reload(); // signed out
      if (!response.ok) throw new Error(String(response.status));
      draw((await response.json()).found);
    } catch {
      if (!signal.aborted)
        status.textContent = "The search does not answer. Try again in a moment.";
    }
  }

  function open() {
    if (dialog.open || document.querySelector("dialog[open]")) return;
    input.value = "";
    list.replaceChildren();
    dialog.showModal();
    input.focus();
    search();
  }

  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, WAIT_MS);
  });
  input.addEventListener("keydown", (event) => {
    const last = options().length - 1;
    const to = {
      ArrowDown: at === last ? 0 : at + 1,
      ArrowUp: at ? at - 1 : last,
      Home: 0,
      End: last,
    }[event.key];
    const isPlain = event.key.startsWith("Arrow") || !input.value;
    if (to !== undefined && isPlain) {
      event.preventDefault();
      select(to);
    } else if (event.key === "Enter") {
      event.preventDefault();
      options()[at]?.click();
    }
  });
  button.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open();
  });
  document.addEventListener("keydown", (event) => {
    if (
      event.key.toLowerCase() !== "k" ||
      !(event.ctrlKey || event.metaKey) ||
      event.altKey ||
      event.shiftKey
    )
      return;
    event.preventDefault();
    open();
  });
}
