"""The admin site of the tables."""

from runs.admin import audit, credentials, replicas, tables, webhooks

__all__ = ["audit", "credentials", "replicas", "tables", "webhooks"]
