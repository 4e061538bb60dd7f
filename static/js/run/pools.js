// Pools: hardware, cost, and the state of the circuit breaker.

import BREAKER from "../lib/breakers.json" with { type: "json" };
import * as format from "../lib/format.js";
import { $, $$, ACTIONS, cellOf, clamp, h, icon, keyed, setText, table } from "../lib/dom.js";
import { left } from "../lib/times.js";
import { RUN_ENDED } from "../lib/states.js";

const WHAT = {
  action_required: "is blocked",
  price_limit: "is above its price limit",
  budget: "has no budget left",
};
const COLUMNS = ["Pool", "Region", "#Live", "#Price", "#Cost", "#Job time limit", "Launches"];

export function poolTable(context) {
  const { store, page } = context;
  const place = $("[data-pools-table]");
  const filter = $("[data-pool-filter]");
  const trouble = $("[data-trouble]");
  const ask = "mayOperate" in page.dataset ? scaling(context) : null;
  const body = h("tbody");
  place.append(table("table.pools", "Pools of this run", [...COLUMNS, ACTIONS()], body));
  filter.addEventListener("change", () => context.showPool(Number(filter.value) || null));
  setInterval(
    () => $$("[data-until]", body).forEach((cell) => setText(cell, left(cell.dataset.until))),
    1000,
  );

  return (changed) => {
    if (!changed.has("pools") && !changed.has("run")) return;
    const pools = store.poolRows();
    const ended = RUN_ENDED.has(store.run.state);
    const rows = pools.flatMap((pool) =>
      pool.breaker.last_error ? [{ pool }, { pool, trouble: true }] : [{ pool }],
    );
    keyed(
      body,
      rows,
      (row) => `${row.pool.id}${row.trouble ? "t" : ""}`,
      (row) => (row.trouble ? troubleRow() : make(row.pool, context, ask)),
      (tr, row) =>
        row.trouble ? setTrouble(tr.firstElementChild, row.pool) : update(tr, row.pool, store.run),
    );
    options(filter, pools, context.pool);
    const blocked = pools.filter(
      ({ breaker }) => breaker.last_error && breaker.state !== "failing",
    );
    banners(trouble, ended ? [] : blocked, page.dataset.backends);
    const add = $("[data-pool-add]");
    if (add) add.hidden = ended || store.run.state === "stopping";
  };
}

const troubleRow = () => h("tr.trouble", {}, h("td", { colspan: COLUMNS.length + 1 }));

const button = (spec, properties, text) => h(spec, { type: "button", ...properties }, text);

function make(pool, context, ask) {
  const filter = () => context.showPool(context.pool === pool.id ? null : pool.id);
  const scale = () => ask(context.store.pools.get(pool.id));
  const hardware = [pool.hardware, pool.name].includes(pool.hardware_label)
    ? ""
    : pool.hardware_label;
  return h(
    "tr",
    {},
    h(
      "th",
      { scope: "row" },
      button("button.link", { title: "Show only its replicas", onclick: filter }, pool.name),
      h("span.why", {}, hardware)),
    COLUMNS.slice(1).map(cellOf),
    h("td.c-act", {}, ask ? button("button.btn.btn-s", { onclick: scale }, "Scale") : null));
}

function update(tr, pool, run) {
  const [, where, live, price, cost, deadline, launches, act] = tr.children;
  const text = [pool.region, pool.credential].filter(Boolean).join(" · ");
  const key = JSON.stringify([text, pool.spot]);
  if (where.dataset.key !== key) {
    where.dataset.key = key;
    const shown = text || (pool.spot ? "" : format.UNKNOWN);
    const spot = pool.spot ? h("span.chip", {}, "spot") : "";
    where.replaceChildren(h("span.clip", { title: text }, shown), spot);
  }
  setText(live, `${pool.live} of ${pool.wanted}`);
  const usd_h = pool.price_usd_h;
  setText(price, usd_h === null ? "unknown" : `${format.money(usd_h)}/h`);
  price.title =
    usd_h === null ? "" : `${format.money(usd_h * pool.wanted)} an hour for ${pool.wanted}`;
  setText(cost, money(pool));
  setText(deadline, pool.timeout_s ? format.duration(pool.timeout_s) : "maximum");
  const { state, open_until: until } = pool.breaker;
  if (launches.dataset.key !== state + until) {
    launches.dataset.key = state + until;
    const [symbol, tone, word] = BREAKER[state];
    launches.replaceChildren(
      h("span.state.state-bare", { dataset: { tone } }, icon(symbol), h("span", {}, word)),
      ...(until ? [" ", h("span.muted", { dataset: { until } }, left(until))] : []));
  }
  act.hidden = !act.children.length || RUN_ENDED.has(run.state) || run.state === "stopping";
}

/** The known amount, with a plus when part of it is unknown. */
export function money(row) {
  if (row.cost_usd === null) return "unknown";
  return row.cost_known ? format.money(row.cost_usd) : `${format.money(row.cost_usd)} + unknown`;
}

function setTrouble(cell, pool) {
  const { last_error: trouble, advice, failures } = pool.breaker;
  const key = trouble + advice + failures;
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  const count = h("b", {}, failures > 1 ? `${failures} in a row: ` : "");
  cell.replaceChildren(
    h("p.words", {}, icon("degraded"), h("span", {}, count, h("span.break", {}, trouble))),
    h("p.advice", {}, advice));
}

function options(filter, pools, chosen) {
  const known = filter.options.length - 1;
  for (const pool of pools.slice(known)) filter.append(h("option", { value: pool.id }, pool.name));
  filter.value = chosen && pools.some((pool) => pool.id === chosen) ? String(chosen) : "";
  filter.parentElement.hidden = pools.length < 2;
}

function banners(place, pools, backends) {
  const links = () =>
    h("span.more", {}, h("a", { href: "?tab=replicas" }, "Details"), " ",
      h("a", { href: backends, dataset: { accounts: "" } }, "Backends"));
  keyed(place, pools, (pool) => pool.id,
    () => h("div.banner", { role: "status" }, icon("degraded"), h("span.break"), links()),
    (banner, pool) => {
      const isBlocked = pool.breaker.state === "action_required";
      banner.dataset.tone = isBlocked ? "failed" : "warning";
      $("[data-accounts]", banner).hidden = !isBlocked;
      const what = WHAT[pool.breaker.state] ?? "fails to launch";
      setText(banner.children[1], `${pool.name} ${what}: ${pool.breaker.last_error}`);
    });
}

function scaling({ store, page }) {
  const dialog = $("[data-scale-dialog]");
  const form = $("[data-scale-form]", dialog);
  const count = form.elements.count;
  let pool = null;

  function follows() {
    const more = Number(count.value) - pool.wanted;
    const sentences = [];
    if (more && pool.price_usd_h === null) sentences.push("The price is unknown.");
    else if (more) {
      const usd = format.money(Math.abs(more) * pool.price_usd_h);
      sentences.push(`${more > 0 ? "+" : "−"}${usd} an hour.`);
    }
    const all = store.poolRows().reduce((sum, one) => sum + one.wanted, 0) + more;
    if (all < store.run.quorum)
      sentences.push(`${all} replicas < quorum ${store.run.quorum}: this will be refused.`);
    setText($("[data-scale-text]", dialog), sentences.join(" "));
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
