// Made of static/js by `make static`: change that instead.
import"./chunk-YUEW5YX7.js";import"./chunk-CY35T5LW.js";import"./chunk-ERNAW3Q2.js";
