"""Membership of a group: leases, the start barrier and graceful shutdown."""
