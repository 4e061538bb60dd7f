// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-PN6FLCKH.js";import{c as m}from"./chunk-JERGYH3V.js";import"./chunk-DMFTDWHS.js";import"./chunk-HORTJG45.js";import{f as r,g as t}from"./chunk-AITAGIZZ.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
