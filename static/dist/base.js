// Made of static/js by `make static`: change that instead.
import"./chunk-STQUIGEV.js";import"./chunk-OEORFEJ6.js";import"./chunk-35YSE42M.js";
