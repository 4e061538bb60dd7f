"""Formats for English, the only language."""
