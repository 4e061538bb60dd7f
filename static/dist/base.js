// Made of static/js by `make static`: change that instead.
import"./chunk-6GXFQX4E.js";import"./chunk-QWLTRHXY.js";import"./chunk-3VRTFQRZ.js";
