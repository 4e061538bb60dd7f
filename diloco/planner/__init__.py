"""Predictions of time, traffic and money, without torch."""
