// Made of static/js by `make static`: change that instead.
import"./chunk-Z6INCM3P.js";import"./chunk-QWLTRHXY.js";import"./chunk-3VRTFQRZ.js";
