// Search in the settings of the submit form, by label, name and help. While a query is entered,
// only matching fields and their sections are shown, also those of closed sections.

import { $, $$, setText } from "../lib/dom.js";

/** Open the sections around an element, show it and focus its input. */
export function reveal(target) {
  if (!target) return;
  for (let at = target.closest("details"); at; at = at.parentElement.closest("details")) {
    at.open = true;
  }
  target.scrollIntoView({ block: "center" });
  const input = "input, select, textarea";
  (target.matches(input) ? target : $(`${input}, summary`, target))?.focus();
}

export function settingSearch(form) {
  const box = $("[data-search]", form);
  const input = $("input", box);
  const note = $("[data-search-count]", box);
  const sections = $$(".section-card", form);
  const edited = new Set(); // the sections with a changed field stay open
  let opened = null; // the sections that were open before the search

  /** The fields of the form. Rows of pools come and go, so they are read for each query. */
  const fields = () => $$(".section-card .field", form).map((field) => {
    const names = $$("[name]", field).map((one) => one.name.replaceAll("_", " ") + " " + one.name);
    const section = $("h2", field.closest(".section-card")).textContent;
    return { field, text: `${field.textContent} ${names.join(" ")} ${section}`.toLowerCase() };
  });

  function search() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      clear();
      return [];
    }
    opened ??= new Set(sections.filter((section) => section.open));
    form.toggleAttribute("data-searching", true);
    const hits = [];
    for (const { field, text } of fields()) {
      const isOffered = !field.closest("[data-when][hidden], template");
      const hit = isOffered && words.every((word) => text.includes(word));
      field.toggleAttribute("data-hit", hit);
      if (hit) hits.push(field);
    }
    for (const section of sections) {
      const has = hits.some((field) => section.contains(field));
      section.open = has;
      section.toggleAttribute("data-hit", has);
    }
    const count = `${hits.length} setting${hits.length === 1 ? "" : "s"}`;
    setText(note, hits.length ? count : "No setting matches");
    return hits;
  }

  function clear() {
    form.removeAttribute("data-searching");
    for (const section of opened ? sections : []) {
      section.open = opened.has(section) || edited.has(section);
    }
    opened = null;
    setText(note, "");
  }

  input.addEventListener("input", search);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault(); // Enter elsewhere is a dry run
      const [first] = search();
      if (first) reveal(first);
    } else if (event.key === "Escape" && input.value) {
      input.value = "";
      clear();
    }
  });
  form.addEventListener("change", ({ target }) => edited.add(target.closest(".section-card")));
  // The answer to a sent form has the same sections open.
  form.addEventListener("submit", () => {
    const shown = sections.filter((section) => section.open);
    form.elements.open.value = shown.map((section) => section.id).join(" ");
  });
  form.addEventListener("click", (event) => {
    const link = event.target.closest("[data-go]");
    if (!link) return;
    event.preventDefault();
    input.value = "";
    clear();
    const name = link.dataset.go;
    const place = document.getElementById(name) ?? document.getElementById(`id_${name}`);
    reveal(place ?? $(`[name="${name}"]`, form));
  });
  for (const link of $$(".submit-index a", form)) {
    link.addEventListener("click", () => {
      input.value = "";
      clear();
      const section = $(link.hash, form);
      if (section.matches("details")) section.open = true;
    });
  }
  const linked = sections.find((section) => `#${section.id}` === location.hash);
  if (linked) linked.open = true;
  if (input.autofocus) input.focus();
  if (input.value) search(); // typed before this script ran
}
