// Made of static/js by `make static`: change that instead.
import{a as e,b as r}from"./chunk-DMFTDWHS.js";import"./chunk-HORTJG45.js";import{f as a}from"./chunk-AITAGIZZ.js";var n=3e3;function p(){let t=a("[data-sweep-page]"),s=e(a("[data-part]",t),n);t.addEventListener("change",o=>o.target.closest("[data-rank]")?.submit()),r(t.dataset.stream,s)}p();
