"""Schedules evaluations of checkpoints: jobs on a backend, and their results."""
