// Made of static/js by `make static`: change that instead.
import{c as s,d as n}from"./chunk-Y4LEZHLR.js";import"./chunk-LX3VXYVE.js";import{f as t,g as r,u as e}from"./chunk-NZKQ2DLX.js";var d=15e3;function i(){let a=t("[data-spend]"),f=s(t("[data-part]",a),d,c=>{for(let o of r("[data-fraction]",c))e(o,Number(o.dataset.fraction))});n(a.dataset.stream,f)}i();
