"""Replicas as Modal Sandboxes."""
