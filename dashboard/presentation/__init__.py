"""Presentation of values: numbers, dates, states and progress."""
