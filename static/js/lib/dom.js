// DOM helpers. The content security policy forbids style attributes (style-src 'self'), so sizes
// and colours that depend on data are set through the CSSOM.

import { look } from "./states.js";

const STATIC = document.body.dataset.static;

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** ARIA roles of table parts: on a narrow screen rows are displayed as cards, which drops them. */
const ROLES = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", td: "cell" };

/** An element: h("td.num", {title: "x"}, "text", child, ...). Null properties are skipped. */
export function h(spec, properties = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  const role = tag === "th" ? `${properties.scope === "col" ? "column" : "row"}header` : ROLES[tag];
  if (role) element.setAttribute("role", role);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** The header of a column; "#name" for a numeric one. */
const column = (name) =>
  h(name[0] === "#" ? "th.num" : "th", { scope: "col" }, name.replace("#", ""));

/** An empty cell of that column. Narrow screens show the name beside the value. */
export const cellOf = (name) =>
  h(name[0] === "#" ? "td.num" : "td", { dataset: { label: name.replace("#", "") } });

/** A table around `body`; `columns` are names, "#name" for numeric columns, or elements. */
export function table(spec, caption, columns, body) {
  const heads = columns.map((one) => (one.nodeType ? one : column(one)));
  return h(
    spec,
    {},
    h("caption.visually-hidden", {}, caption),
    h("thead", {}, h("tr", {}, heads)),
    body,
  );
}

/** The header of an action column. */
export const ACTIONS = () => h("th", { scope: "col" }, h("span.visually-hidden", {}, "Actions"));

/** An SVG element, hidden from screen readers. */
export function svg(tag, properties, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function icon(name) {
  const use = svg("use", { href: `${STATIC}icons.svg#${name}` });
  return svg("svg", { class: "icon", "aria-hidden": "true" }, use);
}

/** The elements of `root` with attribute data-<name>, by name. */
export const marked = (root, ...names) =>
  Object.fromEntries(names.map((name) => [name, $(`[data-${name}]`, root)]));

export const press = (button, on) => button.setAttribute("aria-pressed", String(on));

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

export function stateBadge(state, modifier = "") {
  const { icon: name, tone, word } = look(state);
  const spec = `span.state${modifier ? "." + modifier : ""}`;
  return h(spec, { dataset: { state, tone } }, icon(name), h("span", {}, word));
}

/** Replace a badge only when its state changes, to avoid flicker. */
export function setState(cell, state, modifier = "") {
  const badge = cell.firstElementChild;
  if (badge?.dataset.state !== state) cell.replaceChildren(stateBadge(state, modifier));
}

/** Write text only when it differs: updates must not disturb a selection or a screen reader. */
export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

/** The first line of a message whose rest another place shows. */
export const firstLine = (text) => text.trimStart().split("\n", 1)[0];

export function setFraction(bar, fraction, tone = null) {
  bar.style.setProperty("--f", String(clamp(fraction || 0, 0, 1)));
  if (tone) bar.dataset.tone = tone;
}

/** Reconcile an element's children with keyed rows: reuse, move, add, remove. */
export function keyed(parent, rows, key, make, update) {
  const existing = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const row of rows) {
    const id = String(key(row));
    let child = existing.get(id);
    if (child) existing.delete(id);
    else {
      child = make(row);
      child.dataset.key = id;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, row);
  }
  for (const child of existing.values()) child.remove();
}

const root = document.documentElement;
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark: by the choice in the menu, else by the system. */
export const isDark = () =>
  root.dataset.theme ? root.dataset.theme === "dark" : darkSystem.matches;

/** Call `listener` when the page becomes light or dark. */
export function onTheme(listener) {
  let dark = isDark();
  const check = () => {
    if (dark === isDark()) return;
    dark = isDark();
    listener();
  };
  darkSystem.addEventListener("change", check);
  new MutationObserver(check).observe(root, { attributeFilter: ["data-theme"] });
}

const tokens = new Map();

/** The value of a token, e.g. `--font`. Read once: it is the same in both themes, and reading it
 * after a change of the page computes the styles of all elements. */
export function token(name) {
  if (!tokens.has(name)) tokens.set(name, getComputedStyle(root).getPropertyValue(name).trim());
  return tokens.get(name);
}

/** Whether neither the element nor a tab around it is hidden. Unlike `offsetParent`, it computes no
 * layout. */
export const isShown = (element) => element.isConnected && !element.closest("[hidden]");

/** The colour of a token in the theme of the page, as "#rrggbb". */
export function cssColor(name) {
  const pair = token(name).match(/^light-dark\((.+?), *(.+)\)$/);
  return pair ? pair[isDark() ? 2 : 1] : token(name);
}

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Record a performance measure since `start` (for benchmarks and developer tools). */
export function timed(name, start) {
  performance.clearMeasures(name);
  performance.measure(name, { start });
}

/** View state in the address, so that a link reproduces the view. */
export const url = {
  get: (name) => new URLSearchParams(location.search).get(name),
  /** `push` adds an entry to the history, with `state`. */
  set(values, { push = false, state = null } = {}) {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") query.delete(name);
      else query.set(name, value);
    }
    const text = query.toString();
    const target = location.pathname + (text ? `?${text}` : "") + location.hash;
    if (target === location.pathname + location.search + location.hash) return;
    if (push) history.pushState(state, "", target);
    else history.replaceState(history.state, "", target);
  },
};
