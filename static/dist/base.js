// Made of static/js by `make static`: change that instead.
import"./chunk-M7YQSTIM.js";import"./chunk-REKGVLNN.js";import"./chunk-3OEOMSDC.js";
