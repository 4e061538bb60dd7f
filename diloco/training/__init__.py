"""The round loop and the work around it."""
