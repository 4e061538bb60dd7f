// Made of static/js by `make static`: change that instead.
import"./chunk-Y4LEZHLR.js";import"./chunk-LX3VXYVE.js";import"./chunk-NZKQ2DLX.js";
