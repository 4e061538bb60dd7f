// uPlot as a module. Minified it is published for a plain script element alone, which stands before
// ours in each page that draws with it, and is missing in the others.

export default globalThis.uPlot;
