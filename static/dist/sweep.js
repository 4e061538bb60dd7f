// Made of static/js by `make static`: change that instead.
import{c as e,d as r}from"./chunk-TB7PWCG3.js";import"./chunk-BQDUPQUR.js";import{f as a}from"./chunk-E3ILUD6P.js";var n=3e3;function p(){let t=a("[data-sweep-page]"),s=e(a("[data-part]",t),n);t.addEventListener("change",o=>o.target.closest("[data-rank]")?.submit()),r(t.dataset.stream,s)}p();
