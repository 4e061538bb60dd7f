// The runs list. The server renders rows; live updates change single cells. New runs are announced
// by a button instead of moving rows. The selection is kept in the address.

import "./base.js";
import * as format from "./lib/format.js";
import { isStale, showSilent, showStale } from "./lib/banners.js";
import { $, $$, h, setFraction, setState, setText, url } from "./lib/dom.js";
import { keys } from "./lib/keys.js";
import { getHTML, getJSON, Live } from "./lib/live.js";
import { followList, refreshed } from "./lib/part.js";
import { replicaSwatch, runNumbers } from "./lib/palette.js";
import { inOrder } from "./lib/requests.js";
import { look } from "./lib/states.js";

const COMPARED = 20; // limit of the comparison page
const WHY_LENGTH = 1000; // of the reason of a failure
const COUNT_EVERY_MS = 10_000;
const GROUPS_EVERY_MS = 5_000;

function runsPage() {
  const list = $("[data-runs]");
  const pill = $("[data-new]");
  const bulk = $("[data-bulk]");
  const every = bulk && $("[name=matching]", bulk);
  const rows = new Map($$("[data-run]").map((row) => [row.dataset.run, row]));
  // Time of the newest data of each training run.
  const silence = new Map();
  for (const { dataset } of $$("[data-seen]")) {
    silence.set(dataset.run, { state: "running", last_seen_at: dataset.seen });
  }
  const picked = new Set((url.get("sel") ?? "").split(",").filter(Boolean));

  function show(run) {
    countLater(); // also for a run of another page
    const row = rows.get(run.id);
    if (!row) {
      if (
        list.dataset.firstPage === "1" &&
        Date.parse(run.created_at) > Date.parse(list.dataset.since)
      )
        countNew();
      return;
    }
    const cell = (name) => $(`[data-f="${name}"]`, row); // null for a column that is not shown
    if (cell("state")) setState(cell("state"), run.state);
    silence.set(run.id, run);
    cell("alerts").hidden = !run.alerts;
    setText($("[data-n]", cell("alerts")), String(run.alerts));
    setText(cell("replicas"), `${run.live}/${run.target}`);
    setText(cell("rounds"), `${run.committed_rounds}/${run.total_rounds}`);
    if (cell("bar"))
      setFraction(cell("bar"), run.committed_rounds / run.total_rounds, look(run.state).tone);
    setText(cell("eval_loss"), format.loss(run.eval_loss));
    setText(cell("train_loss"), format.loss(run.train_loss));
    setText(cell("tokens"), format.count(run.tokens));
    setText(cell("tokens_per_s"), format.count(isStale(run) ? null : run.tokens_per_s));
    setText(cell("goodput"), format.percent(run.goodput));
    setText(cell("cost"), format.spent(run.cost_usd, run.cost_known));
    setText(cell("rate"), format.rate(run.usd_h, run.usd_h_known));
    cell("why").hidden = run.state !== "failed" || !run.state_reason;
    setText(
      cell("why"),
      cell("why").hidden ? "" : format.inShort(run.state_reason).slice(0, WHY_LENGTH),
    );
    if (run.started_at && cell("started") && !$("time", cell("started"))) {
      const time = document.createElement("time");
      time.dateTime = run.started_at;
      time.dataset.age = "";
      time.textContent = format.age(format.secondsSince(run.started_at));
      cell("started").replaceChildren(time);
    }
    if (cell("ran"))
      Object.assign(cell("ran").dataset, { from: run.started_at ?? "", to: run.ended_at ?? "" });
  }

  // Counts of the tabs and the totals, which the server computes from all matching runs.
  const overview = $("[data-totals]");
  const totalsNow = inOrder(() => getJSON(overview.dataset.totals));
  async function count() {
    const totals = (await totalsNow().catch(() => {})) ?? {};
    for (const [name, text] of Object.entries(totals))
      setText($(`[data-total="${name}"]`, overview), text);
    if (totals.runs) delete $(".totals", overview).dataset.empty;
    showMatching();
  }
  /** How many runs match, in the offer to select all of them. */
  function showMatching() {
    const place = bulk && $("[data-bulk-total]", bulk);
    if (place) setText(place, $("[data-total=runs]", overview)?.textContent || "runs");
  }
  let counting = 0;
  function countLater() {
    if (!overview) return;
    counting ||= setTimeout(() => {
      counting = 0;
      if (!document.hidden) count();
    }, COUNT_EVERY_MS);
  }
  if (overview) count();

  // Only the server can evaluate the query for new runs, so it is polled at a low rate.
  const address = () => {
    const query = new URLSearchParams(location.search);
    query.delete("sel");
    query.set("since", list.dataset.since);
    return `${list.dataset.poll}?${query}`;
  };
  const load = () => getJSON(address());
  const [newest, counted] = [inOrder(load), inOrder(load)];
  let asking = 0;
  function countNew() {
    asking ||= setTimeout(async () => {
      asking = 0;
      announce((await counted().catch(() => {}))?.new);
    }, 300);
  }

  function announce(count) {
    if (!count || list.dataset.firstPage !== "1") return;
    pill.hidden = false;
    setText($("span", pill), `${count} new`);
  }

  function tick() {
    for (const cell of $$('[data-f="ran"]')) {
      const { from, to } = cell.dataset;
      const end = to ? Date.parse(to) : Date.now();
      setText(cell, from ? format.elapsed((end - Date.parse(from)) / 1000) : format.UNKNOWN);
    }
    for (const [id, run] of silence) {
      const stale = isStale(run);
      $('[data-f="silent"]', rows.get(id)).hidden = !stale;
      const speed = $('[data-f="tokens_per_s"]', rows.get(id)); // null if it is not shown
      if (stale) setText(speed, format.UNKNOWN); // no longer current
    }
    showStale($$('[data-f="silent"]:not([hidden])').length);
  }

  // Selection

  function select() {
    // The colours that Compare would use.
    const numbers = picked.size > COMPARED ? new Map() : runNumbers(picked);
    for (const [id, row] of rows) {
      $("[data-pick]", row).checked = picked.has(id);
      row.toggleAttribute("data-picked", picked.has(id));
      $(".swatch", row)?.remove();
      if (numbers.has(id)) $(".title", row).prepend(replicaSwatch(numbers.get(id)));
    }
    const here = [...rows.keys()].filter((id) => picked.has(id)).length;
    const all = $("[data-pick-all]");
    all.checked = here > 0 && here === rows.size;
    all.indeterminate = here > 0 && here < rows.size;
    const whole = $("[data-bulk-all]", bulk); // offered while other pages have runs that match
    if (whole) {
      whole.hidden = !all.checked;
      if (whole.hidden) every.checked = false;
      showMatching();
    }
    const isEvery = Boolean(every?.checked);
    bulk.hidden = picked.size === 0;
    bulk.dataset.ready = "";
    const elsewhere = picked.size - here;
    const note = elsewhere ? `, ${elsewhere} not on this page` : "";
    setText(
      $("[data-bulk-count]", bulk),
      isEvery ? "All that match selected" : `${picked.size} selected${note}`,
    );
    const compare = $('[value="compare"]', bulk);
    compare.disabled = isEvery || picked.size > COMPARED;
    compare.title = compare.disabled ? `At most ${COMPARED} runs` : "";
    url.set({ sel: [...picked].join(",") });
    for (const form of $$("form[method=get]")) {
      const kept =
        $("[name=sel]", form) ?? form.appendChild(h("input", { type: "hidden", name: "sel" }));
      kept.value = [...picked].join(",");
      kept.disabled = !picked.size;
    }
  }

  function pick(id, on) {
    if (on) picked.add(id);
    else picked.delete(id);
  }

  if (bulk) {
    document.addEventListener("change", (event) => {
      if (event.target.matches("[data-pick-all]"))
        for (const id of rows.keys()) pick(id, event.target.checked);
      else if (event.target.matches("[data-pick]")) pick(event.target.value, event.target.checked);
      else if (event.target !== every) return;
      select();
    });
    // Shift and a click select the rows up to the one that was clicked before.
    let before = null;
    document.addEventListener("click", ({ target, shiftKey }) => {
      if (!target.matches("[data-pick]")) return;
      const order = [...rows.keys()];
      const [from, to] = [order.indexOf(before), order.indexOf(target.value)].sort((a, b) => a - b);
      if (shiftKey && from >= 0)
        for (const id of order.slice(from, to + 1)) pick(id, target.checked);
      before = target.value;
    });
    bulk.addEventListener("reset", () => {
      picked.clear();
      setTimeout(select);
    });
    // Runs are compared in the order of selection, across pages.
    bulk.addEventListener("formdata", (event) => {
      event.formData.delete("id");
      for (const id of every?.checked ? [] : picked) event.formData.append("id", id);
      const back = new URLSearchParams(location.search);
      back.delete("sel");
      event.formData.set("back", back.toString());
    });
    for (const link of $$(".pages a, .runs thead a, .list-tabs a")) {
      link.addEventListener("click", () => {
        const target = new URL(link.href);
        if (picked.size) target.searchParams.set("sel", [...picked].join(","));
        link.href = target.href;
      });
    }
    select();
  }

  // Shortcuts of this page: j and k move through the rows, x selects.

  keys((key) => {
    const order = [...rows.values()];
    const at = order.indexOf(document.activeElement?.closest("[data-run]"));
    if (key === "j" || key === "k") {
      const next =
        order[Math.min(Math.max(at + (key === "j" ? 1 : at < 0 ? 1 : -1), 0), order.length - 1)];
      next && $(".c-name .name", next).focus();
    } else if (key === "x" && at >= 0 && bulk) {
      const id = order[at].dataset.run;
      pick(id, !picked.has(id));
      select();
    } else return false;
    return true;
  });

  for (const drop of $$("[data-facets]")) {
    const fill = async () => {
      const body = $("[data-facets-body]", drop);
      if (!drop.open || body.dataset.read || $(".facet", body)) return;
      body.dataset.read = "1";
      body.textContent = "Counting…";
      try {
        body.innerHTML = await getHTML(drop.dataset.facets);
      } catch {
        delete body.dataset.read;
        body.textContent = "The server did not respond. Close and open again to retry.";
      }
    };
    drop.addEventListener("toggle", fill);
    fill(); // it can be open already
  }

  const field = $("[data-complete]");
  const complete = async () => (await import("./lib/completion.js")).completion(field);
  if (field && document.activeElement === field) complete();
  else field?.addEventListener("focus", complete, { once: true });

  tick();
  setInterval(tick, 1000);
  pill?.addEventListener("click", () => {
    const query = new URLSearchParams(location.search);
    query.delete("before");
    location.assign(`${location.pathname}?${query}`);
  });

  const groups = $("[data-groups]");
  if (groups) followList(groups.dataset.stream, refreshed(groups, GROUPS_EVERY_MS, countLater));
  else if (list) {
    new Live({
      dot: $("[data-conn]"),
      stream: list.dataset.stream,
      topic: "list",
      onDelta: (delta) => delta.run && show(delta.run),
      poll: async () => {
        const answer = await newest();
        if (!answer) return;
        answer.runs.forEach(show);
        announce(answer.new);
        showSilent(answer.silent_since);
      },
    }).start();
  } else $("[data-conn]").hidden = true;
}

runsPage();
