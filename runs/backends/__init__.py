"""What the control plane knows of backends: executors, breakers, prices and health."""
