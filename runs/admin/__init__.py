"""The admin site of the tables."""

from runs.admin import credentials, replicas, tables, webhooks

__all__ = ["credentials", "replicas", "tables", "webhooks"]
