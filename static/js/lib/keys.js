// Keys of pages. They are off while somebody types, while a dialog is open, and with modifiers.

const typing = "input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]";

/** `act(key)` returns whether it did something with it. */
export function keys(act) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest(typing) || document.querySelector("dialog[open]")) return;
    if (act(event.key)) event.preventDefault();
  });
}
