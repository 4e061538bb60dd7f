// Made of static/js by `make static`: change that instead.
import"./chunk-TB7PWCG3.js";import"./chunk-BQDUPQUR.js";import"./chunk-E3ILUD6P.js";
