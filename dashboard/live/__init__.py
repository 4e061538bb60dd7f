"""Server-sent events: one reader per web process that fans messages out to its viewers."""
