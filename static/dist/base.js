// Made of static/js by `make static`: change that instead.
import"./chunk-H7QZSBMU.js";
