// The tooltip of a chart: values of the shown lines at the cursor, the highest first.

import { clamp, h } from "../lib/dom.js";

const MOST = 12;
const GAP = 14;

/** `rows`: [{name, text, value, swatch}]. */
export function tooltip(over) {
  const head = h("b");
  const list = h("ul");
  const box = h("div.chart-tip", { "aria-hidden": "true" }, head, list);
  box.hidden = true;
  over.append(box);
  return {
    hide: () => (box.hidden = true),
    show({ left, top }, title, rows) {
      const sorted = rows.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
      head.textContent = title;
      list.replaceChildren(...sorted.slice(0, MOST).map(({ name, text, swatch }) =>
        h("li", {}, swatch(), h("span", {}, name), h("output", {}, text))));
      if (sorted.length > MOST) list.append(h("li.muted", {}, `${sorted.length - MOST} more`));
      box.hidden = false;
      const right = left + GAP + box.offsetWidth > over.clientWidth;
      box.style.left = `${Math.max(right ? left - GAP - box.offsetWidth : left + GAP, 0)}px`;
      const lowest = over.clientHeight - box.offsetHeight;
      box.style.top = `${clamp(top - box.offsetHeight / 2, 0, Math.max(lowest, 0))}px`;
    },
  };
}
