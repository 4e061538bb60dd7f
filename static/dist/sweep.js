// Made of static/js by `make static`: change that instead.
import{a as r}from"./chunk-YRVNQFVZ.js";import{da as e,f as t}from"./chunk-HGMGNB5Y.js";var p=3e3;function s(){let o=t("[data-sweep-page]"),a=r(t("[data-part]",o),p);new e({dot:t("[data-conn]"),stream:o.dataset.stream,topic:"list",after:()=>"",onDelta:a.soon,poll:a.now}).start()}s();
