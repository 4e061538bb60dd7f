// uPlot as a module. Minified it is published for a plain script element alone, which stands before
// the module in each page that draws with it; that saves half of all the JavaScript there is.

export default globalThis.uPlot;
