// A page with one pool row of the submit form; one launch per click.

import "./base.js";
import { $, $$ } from "./lib/dom.js";
import { sendOnce } from "./lib/forms.js";
import { poolRow } from "./submit/pools.js";

function poolAddPage() {
  const form = $("[data-add-pool-form]");
  poolRow($("[data-pool]", form));
  $("[role=alert]", form)?.focus();
  sendOnce(form, $$("[type=submit]", form));
}

poolAddPage();
