"""Telemetry of a replica: metrics, log lines and round reports."""
