// Made of static/js by `make static`: change that instead.
import"./chunk-DMFTDWHS.js";import"./chunk-HORTJG45.js";import"./chunk-AITAGIZZ.js";
