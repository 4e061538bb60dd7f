// The grid of panels of a board: size, order, pin, full screen, add and remove. In the address:
// ?panels=loss.l,norm.m,-cosine,m:grad_norm.s!&full=loss. A size is s, m or l, "!" is pinned, "-"
// removed, and "m:" a metric that the user added. Listed are the panels that differ from the usual
// ones, in their order; runs/queries/panel_layout.py checks what is saved as a view.

import { $, $$, h, icon, press, setText, url } from "../lib/dom.js";
import { getJSON } from "../lib/live.js";
import { viewMenu } from "./views.js";

const SIZES = ["s", "m", "l"];
const NAMES = { s: "small", m: "medium", l: "large" };
const SPAN = { s: 2, m: 3, l: 6 }; // of six columns
const METRIC = /^[A-Za-z0-9_.-]{1,100}$/;
const MOST = 24; // added metrics
const LISTED = 36;

/** The panels of the address, as Map id -> {size, pinned, removed}. */
export function parse(text) {
  const panels = new Map();
  for (const entry of (text ?? "").split(",").slice(0, LISTED)) {
    const match = /^(-?)((?:m:)?[A-Za-z0-9_.-]{1,100}?)(?:\.([sml])(!?))?$/.exec(entry);
    if (!match) continue;
    const [, removed, id, size = null, pinned = ""] = match;
    panels.set(id, { size, pinned: Boolean(pinned), removed: Boolean(removed) });
  }
  return panels;
}

export function format(panels) {
  return [...panels].map(([id, { size, pinned, removed }]) =>
    removed ? `-${id}` : `${id}.${size}${pinned ? "!" : ""}`).join(",");
}

/** All ids of `usual`, of which the `wanted` ones come in their own order. */
export function arranged(usual, wanted) {
  const next = wanted.filter((id) => usual.includes(id));
  const listed = new Set(next);
  return usual.map((id) => (listed.has(id) ? next.shift() : id));
}

/** Manage the panels in `place`. `add(card)` and `drop(card)` connect a card with its board,
 * `changed()` draws again after a new layout. */
export function panelGrid(place, page, { add, drop, changed }) {
  const template = $("[data-panel-template]", place);
  const dialog = $("[data-panel-dialog]");
  const sizes = new Map(
    $$("[data-plot]", place).map((card) => [card.dataset.plot, card.dataset.size || "m"]),
  ); // of the standard panels
  const removed = new Map(); // id -> its card, of standard panels
  let state = new Map();
  let before = null; // what had the focus before full screen

  const cards = () => $$("[data-plot]", place);
  const cardOf = (id) => cards().find((card) => card.dataset.plot === id);
  const title = (card) => $("h2", card).textContent;

  const isAdded = (id) => id.startsWith("m:");
  const usualOrder = (ids) => [...sizes.keys(), ...ids.filter(isAdded)];

  function save() {
    const ids = [...state.keys()];
    const usual = usualOrder(ids);
    const isUsual = (id, i) =>
      usual[i] === id && format(new Map([[id, state.get(id)]])) === `${id}.${sizes.get(id)}`;
    const listed = ids.filter((id, i) => !isUsual(id, i));
    url.set({ panels: format(new Map(listed.map((id) => [id, state.get(id)]))) });
  }

  function read() {
    const wanted = parse(url.get("panels"));
    const ids = [...wanted.keys()].filter((id) => sizes.has(id) || !wanted.get(id).removed);
    const panel = ({ size, pinned = false, removed = false } = {}, id) => ({
      size: size ?? sizes.get(id) ?? "m",
      pinned,
      removed,
    });
    state = new Map(
      arranged(usualOrder(ids), ids).map((id) => [id, panel(wanted.get(id), id)]),
    );
    for (const card of cards()) if (!state.has(card.dataset.plot)) take(card);
    for (const [id, one] of state) {
      if (one.removed) {
        const card = cardOf(id);
        if (card) take(card);
      } else if (!cardOf(id)) put(id);
    }
    arrange();
    fill(url.get("full"));
  }

  function take(card) {
    const id = card.dataset.plot;
    if (!isAdded(id)) removed.set(id, card);
    else drop(card);
    card.remove();
  }

  function put(id) {
    let card = removed.get(id);
    if (!card) {
      card = template.content.firstElementChild.cloneNode(true);
      const name = id.slice(2);
      card.dataset.plot = id;
      const heading = $("h2", card);
      heading.id = `h-${id}`;
      card.setAttribute("aria-labelledby", heading.id);
      setText(heading, name.replaceAll("_", " "));
      $("[data-chart]", card).setAttribute(
        "aria-label",
        `${heading.textContent}. Left and right arrows read the points.`,
      );
      decorate(card);
      place.append(card);
      add(card);
    } else place.append(card);
    removed.delete(id);
  }

  /** Pinned panels first; the toolbar comes after the first row. */
  function arrange() {
    const rank = new Map([...state.keys()].map((id, i) => [id, i]));
    const sorted = cards().sort((a, b) => {
      const [one, two] = [state.get(a.dataset.plot), state.get(b.dataset.plot)];
      return two.pinned - one.pinned || rank.get(a.dataset.plot) - rank.get(b.dataset.plot);
    });
    let used = 0;
    sorted.forEach((card, i) => {
      const { size, pinned } = state.get(card.dataset.plot);
      card.dataset.size = size;
      card.toggleAttribute("data-pinned", pinned);
      press($("[data-pin]", card), pinned);
      used += SPAN[size];
      const order = String(i === 0 || used <= 6 ? i : 100 + i);
      if (card.style.order !== order) card.style.order = order;
      // The order of Tab.
      if (place.children[i] !== card) place.insertBefore(card, place.children[i]);
    });
    changed();
  }

  function update(id, values) {
    state.set(id, { ...state.get(id), ...values });
    save();
    read();
  }

  /** Exchange a panel with the one before or after it. */
  function move(id, by) {
    const shown = cards().map((card) => card.dataset.plot);
    const other = shown[shown.indexOf(id) + by];
    if (other && state.get(other).pinned === state.get(id).pinned) {
      const ids = [...state.keys()].filter((one) => one !== id);
      ids.splice(ids.indexOf(other) + (by > 0 ? 1 : 0), 0, id);
      state = new Map(ids.map((one) => [one, state.get(one)]));
      save();
      read();
    }
    const card = cardOf(id);
    $(by > 0 ? "[data-after]" : "[data-before]", card).focus({ preventScroll: true });
    const rank = cards().indexOf(card) + 1;
    setText($("[data-announce]", card), `${title(card)}: ${rank} of ${cards().length}`);
  }

  function fill(id) {
    for (const card of cards()) {
      const full = card.dataset.plot === id;
      card.toggleAttribute("data-full", full);
      const button = $("[data-expand]", card);
      press(button, full);
    }
    document.documentElement.toggleAttribute("data-full-panel", Boolean(id && cardOf(id)));
    changed();
  }

  function setFull(card, on) {
    url.set({ full: on ? card.dataset.plot : null }, { push: on });
    if (on) before = document.activeElement;
    fill(on ? card.dataset.plot : null);
    if (!on) before?.focus({ preventScroll: true });
  }

  function decorate(card) {
    const id = card.dataset.plot;
    const button = (name, label, mark, act) =>
      h(
        "button.btn.btn-s.btn-quiet",
        {
          type: "button",
          "aria-label": label,
          title: label,
          dataset: { [mark]: "" },
          onclick: act,
        },
        icon(name),
      );
    const next = () => {
      const size = SIZES[(SIZES.indexOf(state.get(id).size) + 1) % SIZES.length];
      update(id, { size });
      setText($("[data-announce]", card), `${title(card)}: ${NAMES[size]}`);
    };
    const name = title(card);
    $(".panel-buttons", card).append(
      h(
        "span.panel-tools",
        { role: "group", "aria-label": `Panel ${name}` },
        button("left", `Move ${name} earlier`, "before", () => move(id, -1)),
        button("right", `Move ${name} later`, "after", () => move(id, 1)),
        button("size", `Resize ${name}`, "resize", next),
        button("pin", `Pin ${name} to the top`, "pin", () => {
          update(id, { pinned: !state.get(id).pinned });
          $("[data-pin]", card).focus({ preventScroll: true });
        }),
        button("expand", `Show ${name} in full screen`, "expand", () =>
          setFull(card, !card.hasAttribute("data-full")),
        ),
        button("close", `Remove ${name}`, "remove", () => {
          if (isAdded(id)) state.delete(id);
          else state.set(id, { ...state.get(id), removed: true });
          save();
          read();
          $("[data-add-panel]", place)?.focus();
        }),
      ),
    );
  }

  /** The dialog that adds a metric: removed panels, then all series of the run. */
  async function offer() {
    const list = $("[data-metrics]", dialog);
    const find = $("input", dialog);
    list.replaceChildren(h("li.muted", {}, "Searching…"));
    find.value = "";
    dialog.showModal();
    let names = [];
    try {
      names = [...new Set((await getJSON(page.dataset.metrics)).map((row) => row.series))];
    } catch {
      // the connection indicator shows the state; removed panels can be added back
    }
    const back = [...state]
      .filter(([, one]) => one.removed)
      .map(([id]) => ({ id, text: title(removed.get(id)) }));
    const metrics = names
      .filter((name) => METRIC.test(name) && !state.has(`m:${name}`))
      .map((name) => ({ id: `m:${name}`, text: name }));
    const draw = () => {
      const words = find.value.trim().toLowerCase();
      const rows = [...back, ...metrics].filter(({ text }) => text.toLowerCase().includes(words));
      list.replaceChildren(
        ...rows.map(({ id, text }) =>
          h(
            "li",
            {},
            h("button.btn.btn-quiet", { type: "button", onclick: () => choose(id) }, text),
          ),
        ),
      );
      if (!rows.length)
        list.append(
          h("li.muted", {}, names.length ? "No metric has this name." : "No metrics yet."),
        );
    };
    find.oninput = draw;
    draw();
    find.focus();
  }

  function choose(id) {
    if (state.size > sizes.size + MOST) return;
    state.set(id, { size: state.get(id)?.size ?? "m", pinned: false, removed: false });
    dialog.close();
    save();
    read();
    const card = cardOf(id);
    card.scrollIntoView({ block: "nearest" });
    $("[data-chart]", card).focus({ preventScroll: true });
  }

  for (const card of cards()) decorate(card);
  $("[data-add-panel]", place)?.addEventListener("click", offer);
  addEventListener("keydown", (event) => {
    const full = $("[data-plot][data-full]", place);
    if (event.key !== "Escape" || !full || dialog.open) return;
    event.preventDefault();
    setFull(full, false);
  }, { capture: true });
  viewMenu(place);
  read();
  return { read };
}
