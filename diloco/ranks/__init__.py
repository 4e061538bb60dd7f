"""Replicas of several ranks."""
