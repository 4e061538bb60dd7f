"""The Django admin site."""

from runs.admin import audit, credentials, replicas, tables, webhooks

__all__ = ["audit", "credentials", "replicas", "tables", "webhooks"]
