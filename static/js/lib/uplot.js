export default globalThis.uPlot; // by a script element before the modules: it is published minified only so

