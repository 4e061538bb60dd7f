"""English is the one language there is."""
