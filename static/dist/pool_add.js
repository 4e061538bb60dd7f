// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-PXZUMZQM.js";import{d as m}from"./chunk-3UOFQ66H.js";import"./chunk-STQUIGEV.js";import"./chunk-OEORFEJ6.js";import{f as r,g as t}from"./chunk-35YSE42M.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
