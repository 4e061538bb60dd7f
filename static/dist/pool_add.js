// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-HQOTZS5X.js";import{c as m}from"./chunk-EO3ZYZM6.js";import"./chunk-KXJ5T26N.js";import"./chunk-BLOHGFE2.js";import{f as r,g as t}from"./chunk-MJGHWYAG.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
