"""Turns a submitted form or document into a stored run."""
