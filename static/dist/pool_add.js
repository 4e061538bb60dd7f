// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-PFF4GNHS.js";import{c as m}from"./chunk-U32TWVHA.js";import"./chunk-GZWYENCM.js";import"./chunk-T3R5RC3E.js";import{f as r,g as t}from"./chunk-JJSX7ZWB.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
