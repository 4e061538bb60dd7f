// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-E6K5ZVIX.js";import{c as m}from"./chunk-DJXRAJTD.js";import"./chunk-LLX5XSG6.js";import"./chunk-6O66KIZE.js";import{f as r,g as t}from"./chunk-J7Z2XEBU.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
