// Small helpers around the DOM. Nothing sets a style attribute (the policy is style-src 'self'):
// sizes and colours that depend on data are set through the CSSOM.

import { look } from "./states.js";

const STATIC = document.body.dataset.static;

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** An element: h("td.num", {title: "x"}, "text", child, ...). Properties that are null are left out. */
export function h(spec, properties = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `${STATIC}icons.svg#${name}`);
  svg.append(use);
  return svg;
}

export function stateBadge(state, modifier = "") {
  const { icon: name, tone, word } = look(state);
  return h(`span.state${modifier ? "." + modifier : ""}`, { dataset: { state, tone } }, icon(name), h("span", {}, word));
}

/** Replace a badge only when its state has changed, so that nothing flickers. */
export function setState(cell, state, modifier = "") {
  const badge = cell.firstElementChild;
  if (badge?.dataset.state !== state) cell.replaceChildren(stateBadge(state, modifier));
}

/** Write text only when it differs: live updates must not disturb a selection or a screen reader. */
export function setText(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

export function setFraction(bar, fraction, tone = null) {
  bar.style.setProperty("--f", String(Math.min(Math.max(fraction || 0, 0), 1)));
  if (tone) bar.dataset.tone = tone;
}

/** Keep an element's children in step with keyed rows: reuse, move, add, remove. */
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

export const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const darkScheme = matchMedia("(prefers-color-scheme: dark)");
export const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** Run `work` at the next frame, once however often it is asked for. */
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** How long something took since `start`, for whoever looks (benches, the browser's own tools). */
export function timed(name, start) {
  performance.clearMeasures(name);
  performance.measure(name, { start });
}

/** What a view keeps in the address, so that any view can be pasted to a colleague. */
export const url = {
  get: (name) => new URLSearchParams(location.search).get(name),
  set(values, { push = false } = {}) {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") query.delete(name);
      else query.set(name, value);
    }
    const text = query.toString();
    const target = location.pathname + (text ? `?${text}` : "") + location.hash;
    if (target === location.pathname + location.search + location.hash) return;
    history[push ? "pushState" : "replaceState"](null, "", target);
  },
};
