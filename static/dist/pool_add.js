// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-A5HFNPMK.js";import{c as m}from"./chunk-NWM5L2PO.js";import"./chunk-Z6INCM3P.js";import"./chunk-QWLTRHXY.js";import{f as r,g as t}from"./chunk-3VRTFQRZ.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
