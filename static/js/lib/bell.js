// The bell: the number of unread alerts, and a panel with the newest. It follows the alerts over
// the stream that all pages share. Without JavaScript the bell is a link to the page of alerts,
// which this module keeps current, as it does with banners that only the server can know about.

import { $, h } from "./dom.js";
import { getHTML, getJSON, Live, SignedOut } from "./live.js";
import { refreshed, replace } from "./part.js";
import { oneAtATime } from "./requests.js";
import { tickTimes } from "./times.js";

const BANNERS_MS = 60_000;
const TOKEN = "input[name=csrfmiddlewaretoken]";

export function bell() {
  const link = $("[data-bell]");
  if (!link) return;
  const number = $("[data-n]", link);
  const body = h("div.bell-body", { tabindex: "-1" });
  const panel = h(
    "div.bell-panel",
    { popover: "auto", role: "dialog", "aria-label": "Alerts" },
    h("div.bell-head", {}, h("h2.grow", {}, "Alerts"), h("a", { href: link.href }, "All alerts")),
    body,
  );
  link.after(panel);
  link.setAttribute("role", "button");
  link.setAttribute("aria-haspopup", "dialog");
  link.setAttribute("aria-expanded", "false");
  const isOpen = () => panel.matches(":popover-open");
  let marks = 0; // changes when alerts are marked as read: counts asked for before are old then

  function show(unread) {
    number.textContent = unread > 99 ? "99+" : String(unread);
    number.hidden = !unread;
    link.setAttribute("aria-label", unread ? `Alerts, ${number.textContent} unread` : "Alerts");
  }

  const load = oneAtATime(async () => {
    const made = document.createElement("template");
    made.innerHTML = await getHTML(`${link.href}?part=panel`);
    replace(body, made.content);
  });

  async function markRead() {
    const until = $("[data-newest]", body)?.dataset.newest;
    if (!until || number.hidden) return;
    marks++;
    const response = await fetch(link.dataset.read, {
      method: "POST",
      headers: { Accept: "application/json", "X-CSRFToken": $(TOKEN)?.value ?? "" },
      body: new URLSearchParams({ until }),
    });
    marks++;
    if (response.ok) show((await response.json()).unread);
  }

  function fail() {
    body.replaceChildren(
      h("p.empty-s", {}, "The alerts can't be loaded now. Try again in a moment."),
    );
  }

  async function open() {
    panel.showPopover();
    try {
      await load();
      body.focus({ preventScroll: true });
      await markRead();
    } catch {
      fail();
    }
  }

  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (isOpen()) panel.hidePopover();
    else open();
  });
  link.addEventListener("keydown", (event) => {
    if (event.key !== " ") return;
    event.preventDefault();
    link.click();
  });
  panel.addEventListener("toggle", ({ newState }) =>
    link.setAttribute("aria-expanded", String(newState === "open")),
  );

  // *Acknowledge* of the panel leaves the page below as it is.
  body.addEventListener("submit", async (event) => {
    const form = event.target;
    const button = $("button", form);
    event.preventDefault();
    if (button.ariaDisabled) return;
    button.ariaDisabled = "true";
    try {
      const response = await fetch(form.action, {
        method: "POST",
        body: new FormData(form),
        redirect: "manual",
      });
      if (response.type !== "opaqueredirect") return form.submit(); // the next page has the reason
      await load(); // raises SignedOut if the redirect was to the sign-in page
      body.focus({ preventScroll: true });
    } catch (error) {
      if (error instanceof SignedOut) form.submit();
      else fail();
    }
  });

  const list = $("[data-alerts]");
  const alerts = list && refreshed(list, 0);
  const refresh = oneAtATime(async () => {
    const asked = marks;
    const { unread } = await getJSON(link.dataset.bell);
    if (marks === asked) show(unread);
    if (isOpen()) await load();
    alerts?.soon();
    await banners();
  });
  const soon = throttled(refresh);
  setInterval(() => document.hidden || banners().catch(() => {}), BANNERS_MS);
  new Live({
    stream: link.dataset.stream,
    topic: "alerts",
    after: () => "",
    onDelta: soon,
    poll: refresh,
  }).start();
}

const banners = oneAtATime(async () => {
  const place = $("[data-troubles]");
  if (!place) return;
  const html = await getHTML(place.dataset.troubles);
  if (place.innerHTML.trim() !== html.trim()) place.innerHTML = html;
  tickTimes(place);
});

/** Call `work` soon, at most every two seconds: many pages are notified at the same time. */
function throttled(work) {
  let timer = 0;
  let last = 0;
  return () => {
    timer ||= setTimeout(
      () => {
        timer = 0;
        last = Date.now();
        work().catch(() => {}); // the next change or poll tries again
      },
      Math.max(0, last + 2000 - Date.now()) + Math.random() * 300,
    );
  };
}
