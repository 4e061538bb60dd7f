// The drawer at the right: a round, a replica or an event, beside the page and not over it. It is
// in the address (?round=12, ?drawer=replica-3, ?drawer=event-55), so Back closes it, and a link
// opens it.

import { $, h, url } from "../lib/dom.js";
import { getHTML, NotFound } from "../lib/live.js";

const OPENED = "drawer"; // state of a history entry that opened the drawer
const AGAIN_MS = 5000; // minimum interval between requests for a replica

export function drawer(context) {
  const { store, page } = context;
  const place = $("[data-drawer]", page);
  const content = $("[data-drawer-content]", place);
  const rounds = $("[data-round-detail]", place);
  let shown = ""; // what is in the drawer, such as "replica-3"
  let opener = null; // what had the focus before
  let asked = 0;
  let timer = 0;
  let sent = 0;
  let answered = 0; // number of the latest request whose answer is shown

  const addressed = () =>
    url.get("round") ? `round-${url.get("round")}` : (url.get("drawer") ?? "");

  async function load(name) {
    asked = performance.now();
    const request = ++sent;
    const isCurrent = () => shown === name && request > answered;
    const [, kind, number] = /^(replica|event)-(\d+)$/.exec(name) ?? [];
    if (!kind) return explain("The address names no replica, round or event.");
    try {
      const html = await getHTML(place.dataset[kind].replace(/\/0$/, `/${number}`));
      if (!isCurrent()) return;
      answered = request;
      content.innerHTML = html;
    } catch (error) {
      if (!isCurrent()) return;
      if (error instanceof NotFound) explain(`This run has no ${kind} ${number}.`);
      else if (!content.children.length) explain("The details couldn't be loaded.");
    }
  }

  const explain = (text) => content.replaceChildren(h("p.empty-s", {}, text));

  async function show({ focus = false } = {}) {
    const name = addressed();
    if (name === shown) return;
    shown = name;
    context.selected = name.startsWith("round-") ? Number(url.get("round")) || null : null;
    const round = context.selected !== null;
    place.hidden = !name;
    page.toggleAttribute("data-drawer-open", Boolean(name));
    rounds.hidden = !round;
    content.hidden = round;
    if (!round) content.replaceChildren();
    context.redraw(new Set(["rounds"]));
    if (name && !round) await load(name);
    if (!name) {
      (opener?.isConnected ? opener : null)?.focus({ preventScroll: true });
      opener = null;
    } else if (focus) place.focus({ preventScroll: true });
  }

  /** Open `name`, such as "replica-3" or "round-12"; "" closes. */
  function open(name) {
    if (name === addressed()) return;
    const first = !addressed();
    if (first) opener = document.activeElement;
    const [kind, number] = name.split("-");
    const values =
      kind === "round" ? { round: number, drawer: null } : { round: null, drawer: name || null };
    url.set(values, { push: first, state: first ? OPENED : null });
    show({ focus: first });
  }

  function close() {
    if (!addressed()) return;
    if (history.state === OPENED) history.back();
    else open("");
  }

  $("[data-drawer-close]", place).addEventListener("click", close);
  page.addEventListener("click", (event) => {
    const link = event.target.closest("[data-drawer-link]");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    open(link.dataset.drawerLink);
  });
  addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select, dialog");
    if (event.key === "Escape" && !typing && !event.defaultPrevented) close();
  });
  addEventListener("popstate", () => show());
  context.open = open;

  return (changed) => {
    if (!store.run) return;
    show();
    const [kind, number] = shown.split("-");
    if (
      kind !== "replica" ||
      !changed.has("replicas") ||
      place.contains(document.activeElement?.closest("details, form"))
    )
      return;
    if (!store.replicas.has(Number(number))) return;
    timer ||= setTimeout(() => {
      timer = 0;
      load(shown);
    }, Math.max(0, asked + AGAIN_MS - performance.now()));
  };
}
