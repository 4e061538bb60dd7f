// Made of static/js by `make static`: change that instead.
import"./chunk-LGZ37YUM.js";
