// Made of static/js by `make static`: change that instead.
import"./chunk-KXJ5T26N.js";import"./chunk-BLOHGFE2.js";import"./chunk-MJGHWYAG.js";
