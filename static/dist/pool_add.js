// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-WA4FAW2I.js";import{c as m}from"./chunk-2EUXYZRE.js";import{f as r,g as t}from"./chunk-HGMGNB5Y.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
