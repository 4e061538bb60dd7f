// One row of the submit form on a page of its own, and one launch per press.

import { $ } from "./lib/dom.js";
import { poolRow } from "./submit/pools.js";

export function poolAddPage() {
  const form = $("[data-add-pool-form]");
  poolRow($("[data-pool]", form));
  $("[role=alert]", form)?.focus();

  let sending = false;
  form.addEventListener("submit", (event) => {
    if (sending) event.preventDefault();
    sending = true;
    $("[type=submit]", form).setAttribute("aria-disabled", "true");
  });
  addEventListener("pageshow", (event) => {
    if (!event.persisted) return;
    sending = false;
    $("[type=submit]", form).removeAttribute("aria-disabled");
  });
}
