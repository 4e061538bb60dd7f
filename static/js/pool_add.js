// One row of the submit form on a page of its own, and one launch per press.

import { $ } from "./lib/dom.js";
import { sendOnce } from "./lib/forms.js";
import { poolRow } from "./submit/pools.js";

export function poolAddPage() {
  const form = $("[data-add-pool-form]");
  poolRow($("[data-pool]", form));
  $("[role=alert]", form)?.focus();
  sendOnce(form, $("[type=submit]", form));
}
