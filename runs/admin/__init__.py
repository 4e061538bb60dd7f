"""The admin site of the tables."""

from runs.admin import credentials, tables, webhooks

__all__ = ["credentials", "tables", "webhooks"]
