// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-YUIIXCD5.js";import{c as m}from"./chunk-TEBBEBC7.js";import{f as r,g as t}from"./chunk-H7QZSBMU.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
