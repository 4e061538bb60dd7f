// Made of static/js by `make static`: change that instead.
import"./chunk-RP5SRBW5.js";import"./chunk-PG7ALPMX.js";import"./chunk-JJIT4FE7.js";
