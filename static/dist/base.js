// Made of static/js by `make static`: change that instead.
import"./chunk-CPFI6I7K.js";import"./chunk-PG7ALPMX.js";import"./chunk-JJIT4FE7.js";
