"""Reads a run's bucket into database tables."""
