// Keyboard shortcuts, disabled in inputs, while a dialog is open, and with modifier keys.

const typing = "input:not([type=checkbox], [type=radio]), textarea, select, [contenteditable]";

/** `act(key)` returns whether it handled the key. */
export function keys(act) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.closest(typing) || document.querySelector("dialog[open]")) return;
    if (act(event.key)) event.preventDefault();
  });
}
