// Pools: where replicas run, what that costs, and what keeps a backend from launching more.

import * as format from "../lib/format.js";
import { $, $$, ACTIONS, clamp, h, icon, keyed, setText, table } from "../lib/dom.js";
import { left } from "../lib/times.js";
import { RUN_ENDED } from "../lib/states.js";

const BREAKER = {
  ok: ["included", "queued", "ok"],
  failing: ["degraded", "warning", "failing"],
  closed: ["paused", "warning", "left alone"],
  trying: ["syncing", "warning", "trying one"],
  person: ["user", "failed", "needs somebody"],
  price: ["paused", "warning", "price held"],
};
const WHAT = { person: "launches nothing until somebody acts", price: "is held" };
const COLUMNS = ["Pool", "Where", "#Live", "#Price", "#Cost", "#Deadline", "Launches"];

export function poolTable(context) {
  const { store, page } = context;
  const place = $("[data-pools-table]");
  const filter = $("[data-pool-filter]");
  const trouble = $("[data-trouble]");
  const ask = "mayOperate" in page.dataset ? scaling(context) : null;
  const body = h("tbody");
  place.append(table("table.pools", "Pools of this run", [...COLUMNS, ACTIONS()], body));
  filter.addEventListener("change", () => context.showPool(Number(filter.value) || null));
  setInterval(() => $$("[data-until]", body).forEach((cell) => setText(cell, left(cell.dataset.until))), 1000);

  return (changed) => {
    if (!changed.has("pools") && !changed.has("run")) return;
    const pools = store.poolRows();
    const rows = pools.flatMap((pool) => (pool.breaker.trouble ? [{ pool }, { pool, trouble: true }] : [{ pool }]));
    keyed(body, rows, (row) => `${row.pool.id}${row.trouble ? "t" : ""}`,
      (row) => (row.trouble ? h("tr.trouble", {}, h("td", { colspan: COLUMNS.length + 1 })) : make(row.pool, context, ask)),
      (tr, row) => (row.trouble ? setTrouble(tr.firstElementChild, row.pool) : update(tr, row.pool, store.run)));
    options(filter, pools, context.pool);
    banners(trouble, RUN_ENDED.has(store.run.state) ? [] : pools.filter((pool) => pool.breaker.trouble && pool.breaker.state !== "failing"));
    const add = $("[data-pool-add]");
    if (add) add.hidden = RUN_ENDED.has(store.run.state) || store.run.state === "stopping";
  };
}

function make(pool, context, ask) {
  return h("tr", {},
    h("th", { scope: "row" },
      h("button.link", { type: "button", title: "Show its replicas alone", onclick: () => context.showPool(context.pool === pool.id ? null : pool.id) }, pool.name),
      h("span.why", {}, [pool.hardware, pool.name].includes(pool.hardware_label) ? "" : pool.hardware_label)),
    COLUMNS.slice(1).map((name) => h(name[0] === "#" ? "td.num" : "td", { dataset: { label: name.replace("#", "") } })),
    h("td.c-act", {}, ask ? h("button.btn.btn-s", { type: "button", onclick: () => ask(context.store.pools.get(pool.id)) }, "Scale") : null));
}

function update(tr, pool, run) {
  const [, where, live, price, cost, deadline, launches, act] = tr.children;
  const words = [pool.region, pool.credential].filter(Boolean).join(" · ");
  const key = JSON.stringify([words, pool.spot]);
  if (where.dataset.key !== key) {
    where.dataset.key = key;
    where.replaceChildren(h("span.clip", { title: words }, words || (pool.spot ? "" : format.UNKNOWN)), pool.spot ? h("span.chip", {}, "spot") : "");
  }
  setText(live, `${pool.live} of ${pool.wanted}`);
  setText(price, pool.price_usd_h === null ? "unknown" : `${format.money(pool.price_usd_h)}/h`);
  price.title = pool.price_usd_h === null ? "" : `${format.money(pool.price_usd_h * pool.wanted)} an hour for ${pool.wanted}`;
  setText(cost, money(pool));
  setText(deadline, pool.timeout_s ? format.duration(pool.timeout_s) : "longest");
  const { state, closed_until: until } = pool.breaker;
  if (launches.dataset.key !== state + until) {
    launches.dataset.key = state + until;
    const [symbol, tone, word] = BREAKER[state];
    launches.replaceChildren(
      h("span.state.state-bare", { dataset: { tone } }, icon(symbol), h("span", {}, word)),
      ...(until ? [" ", h("span.muted", { dataset: { until } }, left(until))] : []));
  }
  act.hidden = !act.children.length || RUN_ENDED.has(run.state) || run.state === "stopping";
}

/** What is known, with a plus where something of it is not. */
export function money(row) {
  if (row.cost_usd === null) return "unknown";
  return row.cost_known ? format.money(row.cost_usd) : `${format.money(row.cost_usd)} + unknown`;
}

function setTrouble(cell, pool) {
  const { trouble, advice, failures } = pool.breaker;
  const key = trouble + advice + failures;
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  cell.replaceChildren(
    h("p.words", {}, icon("degraded"), h("span", {}, h("b", {}, failures > 1 ? `${failures} in a row: ` : ""), h("span.break", {}, trouble))),
    h("p.advice", {}, advice));
}

function options(filter, pools, chosen) {
  const known = filter.options.length - 1;
  for (const pool of pools.slice(known)) filter.append(h("option", { value: pool.id }, pool.name));
  filter.value = chosen && pools.some((pool) => pool.id === chosen) ? String(chosen) : "";
  filter.parentElement.hidden = pools.length < 2;
}

function banners(place, pools) {
  keyed(place, pools, (pool) => pool.id,
    () => h("div.banner", { role: "status" }, icon("degraded"), h("span.break", {}), h("a.more", { href: "?tab=replicas" }, "What to do")),
    (banner, pool) => {
      banner.dataset.tone = pool.breaker.state === "person" ? "failed" : "warning";
      const what = WHAT[pool.breaker.state] ?? "fails to launch";
      setText(banner.children[1], `${pool.name} ${what}: ${pool.breaker.trouble}`);
    });
}

function scaling({ store, page }) {
  const dialog = $("[data-scale-dialog]");
  const form = $("[data-scale-form]", dialog);
  const count = form.elements.count;
  let pool = null;

  function follows() {
    const more = Number(count.value) - pool.wanted;
    const words = [];
    if (more && pool.price_usd_h !== null) words.push(`${more > 0 ? "+" : "−"}${format.money(Math.abs(more) * pool.price_usd_h)} an hour.`);
    if (more && pool.price_usd_h === null) words.push("What that costs is unknown.");
    const all = store.poolRows().reduce((sum, one) => sum + one.wanted, 0) + more;
    if (all < store.run.quorum) words.push(`${all} in all < quorum ${store.run.quorum}: this will be refused.`);
    setText($("[data-scale-text]", dialog), words.join(" "));
  }

  count.addEventListener("input", follows);
  for (const step of $$("[data-step]", dialog)) {
    step.addEventListener("click", () => {
      count.value = clamp(Number(count.value) + Number(step.dataset.step), 0, 1024);
      follows();
    });
  }
  return (chosen) => {
    pool = chosen;
    form.action = page.dataset.scale.replace("/0/scale", `/${pool.id}/scale`);
    setText($("[data-scale-title]", dialog), `Scale ${pool.name}`);
    count.value = pool.wanted;
    form.elements.max_price_usd_h.value = pool.max_price_usd_h ?? "";
    follows();
    dialog.showModal();
    count.select();
  };
}
