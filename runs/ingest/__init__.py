"""A run's bucket as the server reads it into tables."""
