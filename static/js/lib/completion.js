// Completions of a search field, as a combobox: a list below the field, read with the arrow keys.
// Enter or Tab takes one, Escape closes the list. The server completes the text up to the cursor.

import { h } from "./dom.js";
import { getJSON } from "./live.js";

const WAIT_MS = 120; // after the last key

export function completion(field) {
  const list = h("ul.complete", { id: `${field.id}-complete`, role: "listbox", hidden: true });
  list.setAttribute("aria-label", "Completions");
  field.after(list);
  field.setAttribute("role", "combobox");
  field.setAttribute("aria-autocomplete", "list");
  field.setAttribute("aria-controls", list.id);
  field.setAttribute("aria-expanded", "false");
  let rows = [];
  let at = -1;
  let asked = "";
  let timer = 0;

  function close() {
    clearTimeout(timer);
    asked = "";
    show([]);
  }

  function show(found) {
    rows = found;
    list.replaceChildren(
      ...rows.map(({ label, help, runs }, i) =>
        h(
          "li",
          { id: `${list.id}-${i}`, role: "option", onpointerdown: (event) => take(i, event) },
          h("code", {}, label),
          h("span.muted", {}, help || (runs === null ? "" : String(runs))),
        ),
      ),
    );
    list.hidden = !rows.length;
    field.setAttribute("aria-expanded", String(Boolean(rows.length)));
    point(-1);
  }

  function point(i) {
    at = i;
    [...list.children].forEach((row, place) =>
      row.setAttribute("aria-selected", String(place === at)),
    );
    if (at < 0) field.removeAttribute("aria-activedescendant");
    else field.setAttribute("aria-activedescendant", list.children[at].id);
  }

  /** The text up to the cursor is replaced by a completion; the rest stays. */
  function take(i, event) {
    event.preventDefault();
    const rest = field.value.slice(asked.length); // the cursor can have moved since
    const { query } = rows[i];
    field.value = query + rest.trimStart();
    field.setSelectionRange(query.length, query.length);
    field.focus();
    ask();
  }

  async function ask() {
    const text = field.value.slice(0, field.selectionStart);
    asked = text;
    const answer = await getJSON(
      `${field.dataset.complete}?${new URLSearchParams({ q: text })}`,
    ).catch(() => ({ completions: [] })); // the field works without completions
    if (asked === text && document.activeElement === field) show(answer.completions);
  }

  field.addEventListener("input", () => {
    asked = field.value.slice(0, field.selectionStart); // what a listed completion replaces
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT_MS);
  });
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && !rows.length) return void ask();
    if (!rows.length) return;
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) {
      event.preventDefault();
      point(at < 0 && by < 0 ? rows.length - 1 : (at + by + rows.length) % rows.length);
    } else if (event.key === "Escape") {
      event.preventDefault(); // the browser would empty the field
      event.stopPropagation();
      close();
    } else if ((event.key === "Enter" && at >= 0) || (event.key === "Tab" && at >= 0)) {
      take(at, event);
    }
  });
  // Text was typed while this module was loaded.
  if (document.activeElement === field && field.value !== field.defaultValue) ask();
}
