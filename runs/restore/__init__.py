"""Imports a run from its bucket."""
