"""Server-sent events: one reader per web process, fanned out to its viewers."""
