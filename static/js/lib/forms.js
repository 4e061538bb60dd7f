// What forms that ask the server share: errors at their fields, the newest question, one launch
// per press.

import { $$, h, icon } from "./dom.js";

/** Shows `errors[name]` at each field, and to those who hear the page. What has not changed stays. */
export function showErrors(form, errors) {
  for (const list of $$("[data-errors-for]", form)) {
    const messages = errors[list.dataset.errorsFor] ?? [];
    const text = messages.join("\n");
    if ((list.dataset.text ?? list.textContent.trim()) === text) continue;
    list.dataset.text = text;
    list.hidden = !text;
    list.replaceChildren(...messages.map((message) => h("li", {}, icon("failed"), h("span", {}, message))));
    for (const input of [form.elements[list.dataset.errorsFor]].flat()) {
      if (!(input instanceof HTMLElement) || input.type === "radio") continue;
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
      const described = (input.getAttribute("aria-describedby") ?? "").split(" ").filter((id) => id && id !== list.id);
      if (text) described.push(list.id);
      input.setAttribute("aria-describedby", described.join(" "));
    }
  }
}

/** What it returns asks `question()` after so many ms; only the newest question is `answered` or
 *  `failed`. */
export function asker(question, answered, failed) {
  let newest = 0;
  let timer = 0;
  async function ask() {
    const mine = ++newest;
    const [tell, answer] = await question().then((found) => [answered, found], () => [failed]);
    if (mine === newest) tell(answer);
  }
  return (delay_ms) => {
    clearTimeout(timer);
    timer = setTimeout(ask, delay_ms);
  };
}

/** Sends a form once; coming back to one that was sent is a new intention. */
export function sendOnce(form, button, { sent = () => {}, back = () => {} } = {}) {
  let sending = false;
  form.addEventListener("submit", (event) => {
    if (sending) event.preventDefault();
    sending = true;
    button.setAttribute("aria-disabled", "true");
    sent(event);
  });
  addEventListener("pageshow", (event) => {
    if (!event.persisted) return;
    sending = false;
    button.removeAttribute("aria-disabled");
    back();
  });
}
