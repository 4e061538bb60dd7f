"""A run's bucket as the server sees it: read into tables, and commands written into it."""
