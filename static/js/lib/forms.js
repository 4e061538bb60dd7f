// Shared by forms that validate on the server: errors at fields, one launch per click.

import { $$, h, icon } from "./dom.js";

/** Whether the user changed a field that the server rendered, e.g. before a script was loaded. */
export function isEdited(field) {
  if (field.options) {
    const rendered = [...field.options].findIndex((option) => option.defaultSelected);
    return field.selectedIndex !== Math.max(rendered, 0);
  }
  return field.value !== field.defaultValue;
}

/** As in `templatetags/ui.py`. */
const BEGINNING = /^(expected|enter|an?|the|its|another|no|not|only|cancel|leave) /;
const sentence = (text) =>
  BEGINNING.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;

/** Show `errors[name]` at each field and announce them. Unchanged errors stay in place. */
export function showErrors(form, errors) {
  for (const list of $$("[data-errors-for]", form)) {
    const messages = (errors[list.dataset.errorsFor] ?? []).map(sentence);
    const text = messages.join("\n");
    if ((list.dataset.text ?? list.textContent.trim()) === text) continue;
    list.dataset.text = text;
    list.hidden = !text;
    list.replaceChildren(
      ...messages.map((message) => h("li", {}, icon("failed"), h("span", {}, message))),
    );
    for (const input of [form.elements[list.dataset.errorsFor]].flat()) {
      if (!(input instanceof HTMLElement) || input.type === "radio") continue;
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
      const described = (input.getAttribute("aria-describedby") ?? "")
        .split(" ")
        .filter((id) => id && id !== list.id);
      if (text) described.push(list.id);
      input.setAttribute("aria-describedby", described.join(" "));
    }
  }
}

/** Submit a form once; a page restored from the back/forward cache can submit again. */
export function sendOnce(form, buttons, { sent = () => {}, back = () => {} } = {}) {
  let sending = false;
  form.addEventListener("submit", (event) => {
    if (sending) event.preventDefault();
    sending = true;
    for (const button of buttons) button.setAttribute("aria-disabled", "true");
    sent(event);
  });
  addEventListener("pageshow", (event) => {
    if (!event.persisted) return;
    sending = false;
    for (const button of buttons) button.removeAttribute("aria-disabled");
    back();
  });
}
