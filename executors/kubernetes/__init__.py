"""Replicas as Kubernetes Jobs."""
