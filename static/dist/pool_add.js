// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-NS4YVRK3.js";import{d as m}from"./chunk-IUM7RFHA.js";import"./chunk-YUEW5YX7.js";import"./chunk-CY35T5LW.js";import{f as r,g as t}from"./chunk-ERNAW3Q2.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
