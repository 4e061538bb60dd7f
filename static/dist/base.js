// Made of static/js by `make static`: change that instead.
import"./chunk-HGMGNB5Y.js";
