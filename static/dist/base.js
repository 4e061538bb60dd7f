// Made of static/js by `make static`: change that instead.
import"./chunk-DPDUX2PK.js";import"./chunk-35YSE42M.js";
