// uPlot as a module. The published minified build is a classic script; pages with charts load it
// before this bundle, other pages do not.

export default globalThis.uPlot;
