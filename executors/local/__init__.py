"""Replicas as processes of this machine."""
