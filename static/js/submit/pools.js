// The pool rows of the submit form. The selected backend decides which fields a row shows; the
// options carry this information as data attributes.

import { $, $$, h, setText } from "../lib/dom.js";

/** Fields that do not matter are not sent, or something typed for another backend would be. */
function need(block, needed) {
  if (!block) return;
  const show = needed || !!$(".errors:not([hidden])", block);
  block.hidden = !show;
  for (const input of $$("input, select", block)) input.disabled = !show;
}

export function poolRow(row) {
  const at = Object.fromEntries(
    $$("[name]", row).map((input) => [input.name.split(".").pop(), input]),
  );
  const blocks = Object.fromEntries(
    $$("[data-needs]", row).map((block) => [block.dataset.needs, block]),
  );
  const hardware = $$("option", at.hardware);
  const credentials = $$("option", at.credential);
  const list = $("datalist", row);
  list.id = `${at.region.id}_list`;
  at.region.setAttribute("list", list.id);
  let shown = null;

  function offer(select, options) {
    const before = select.value;
    select.replaceChildren(...options);
    select.value = options.some((option) => option.value === before)
      ? before
      : (options[0]?.value ?? "");
  }

  function show() {
    const backend = at.backend.value;
    if (backend !== shown) {
      shown = backend;
      offer(
        at.hardware,
        hardware.filter((option) => option.dataset.backend === backend),
      );
      offer(
        at.credential,
        credentials.filter((option) => !option.value || option.dataset.backend === backend),
      );
    }
    // A credential's own options may change what the backend can do.
    const can =
      (at.credential.value ? at.credential : at.backend).selectedOptions[0]?.dataset ?? {};
    list.replaceChildren(
      ...(can.regions ?? "")
        .split("|")
        .filter(Boolean)
        .map((value) => h("option", { value })),
    );
    at.timeout_s.placeholder = can.longest ?? "no limit";
    need(blocks.credentials, can.remote);
    need(blocks.regions, can.regions);
    need(blocks.images, can.images);
    need(blocks.spot, can.spot);
    need(blocks.limit, can.remote);
    const prices = at.hardware.selectedOptions[0]?.dataset ?? {};
    const listed = prices[at.spot.checked && can.spot ? "spot" : "price"];
    need(blocks.price, listed === undefined || at.price_usd_h.value !== "");
  }

  row.addEventListener("change", show);
  show();
}

export function poolRows(form, changed) {
  const place = $("[data-pool-rows]", form);
  const template = $("[data-pool-template]", form);
  const add = $("[data-add-pool]", form);
  const rows = () => $$("[data-pool]", place);
  let next = Math.max(...rows().map((row) => Number(row.dataset.index))) + 1;

  function renumber() {
    rows().forEach((row, i) => {
      for (const number of $$("[data-pool-number]", row)) setText(number, String(i + 1));
      const remove = $("[data-remove]", row);
      remove.hidden = rows().length === 1;
      remove.setAttribute("aria-label", `Remove pool ${i + 1}`);
    });
  }

  add.addEventListener("click", (event) => {
    event.preventDefault();
    const made = document.createElement("template");
    made.innerHTML = template.innerHTML
      .replaceAll("pools.row", `pools.${next}`)
      .replaceAll('="row"', `="${next}"`);
    const row = made.content.firstElementChild;
    next += 1;
    place.append(row);
    poolRow(row);
    renumber();
    $("select", row).focus();
    changed();
  });

  place.addEventListener("click", (event) => {
    const remove = event.target.closest("[data-remove]");
    if (!remove) return;
    event.preventDefault();
    remove.closest("[data-pool]").remove();
    renumber();
    add.focus();
    changed();
  });

  rows().forEach(poolRow);
  renumber();
  return rows;
}
