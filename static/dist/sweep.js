// Made of static/js by `make static`: change that instead.
import{c as e,d as r}from"./chunk-Y4LEZHLR.js";import"./chunk-LX3VXYVE.js";import{f as a}from"./chunk-NZKQ2DLX.js";var n=3e3;function p(){let t=a("[data-sweep-page]"),s=e(a("[data-part]",t),n);t.addEventListener("change",o=>o.target.closest("[data-rank]")?.submit()),r(t.dataset.stream,s)}p();
