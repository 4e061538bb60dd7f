// The one script of all pages. What a page needs beside what every page has is named by
// <body data-page>; `make static` puts all of it into static/dist/app.js, which is what is served.

import "./base.js";

const PAGES = {
  compare: () => import("./compare.js"),
  planner: () => import("./planner.js"),
  "pool-add": () => import("./pool_add.js"),
  replica: () => import("./replica.js"),
  run: () => import("./run.js"),
  runs: () => import("./runs.js"),
  submit: () => import("./submit.js"),
};
PAGES[document.body.dataset.page]?.();
