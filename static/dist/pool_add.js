// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-7JU7BYSX.js";import{c as m}from"./chunk-FB45WYKG.js";import"./chunk-M7YQSTIM.js";import"./chunk-REKGVLNN.js";import{f as r,g as t}from"./chunk-3OEOMSDC.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
