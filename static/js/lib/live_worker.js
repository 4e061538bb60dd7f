// The shared worker that holds the stream of all tabs; a separate script in static/dist. A page
// without shared workers imports it and serves itself.

import { Stream } from "./stream.js";

const stream = new Stream();

export const serve = (port) => stream.add(port);

globalThis.onconnect = ({ ports: [port] }) => serve(port);
