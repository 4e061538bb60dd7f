// Made of static/js by `make static`: change that instead.
import"./chunk-BOBFPA73.js";
