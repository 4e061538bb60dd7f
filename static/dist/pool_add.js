// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-UHN6MLQT.js";import{d as m}from"./chunk-IFCDYXTZ.js";import"./chunk-CPFI6I7K.js";import"./chunk-PG7ALPMX.js";import{f as r,g as t}from"./chunk-JJIT4FE7.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
