"""The control plane's side of backends: executors, circuit breakers, prices and health."""
