// Made of static/js by `make static`: change that instead.
import"./chunk-GZWYENCM.js";import"./chunk-T3R5RC3E.js";import"./chunk-JJSX7ZWB.js";
