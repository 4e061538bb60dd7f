"""Import a run from its bucket."""
