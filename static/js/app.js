// The one script of all pages. What a page does beside what every page does is named by
// <body data-page>; `make static` puts all of it into static/dist/app.js, which is what is served.
// Each page is a function that runs on that page only.

import "./base.js";
import { comparePage } from "./compare.js";
import { fleetPage } from "./fleet.js";
import { plannerPage } from "./planner.js";
import { poolAddPage } from "./pool_add.js";
import { replicaPage } from "./replica.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { submitPage } from "./submit.js";
import { sweepPage } from "./sweep.js";

const PAGES = {
  compare: comparePage,
  fleet: fleetPage,
  planner: plannerPage,
  "pool-add": poolAddPage,
  replica: replicaPage,
  run: runPage,
  runs: runsPage,
  submit: submitPage,
  sweep: sweepPage,
};
const { page } = document.body.dataset;
if (page && page !== "submit") sessionStorage.removeItem("submit"); // the form was sent
PAGES[page]?.();
