// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-W4XUDGQR.js";import{c as m}from"./chunk-BOX2JF6V.js";import"./chunk-TB7PWCG3.js";import"./chunk-BQDUPQUR.js";import{f as r,g as t}from"./chunk-E3ILUD6P.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
