// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-KEXT4XTG.js";import{c as m}from"./chunk-JAZNCDZN.js";import{f as r,g as t}from"./chunk-BYJNT4RU.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
