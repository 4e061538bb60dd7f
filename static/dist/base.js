// Made of static/js by `make static`: change that instead.
import"./chunk-BYJNT4RU.js";
