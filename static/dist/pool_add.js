// Made of static/js by `make static`: change that instead.
import{a as p}from"./chunk-SU5332XJ.js";import{c as m}from"./chunk-XRKEIY3D.js";import"./chunk-Y4LEZHLR.js";import"./chunk-LX3VXYVE.js";import{f as r,g as t}from"./chunk-NZKQ2DLX.js";function a(){let o=r("[data-add-pool-form]");p(r("[data-pool]",o)),r("[role=alert]",o)?.focus(),m(o,t("[type=submit]",o))}a();
