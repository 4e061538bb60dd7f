// Made of static/js by `make static`: change that instead.
import"./chunk-LLX5XSG6.js";import"./chunk-6O66KIZE.js";import"./chunk-J7Z2XEBU.js";
