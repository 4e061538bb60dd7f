"""The audit log in the admin, read-only for administrators."""

from __future__ import annotations

from django.contrib import admin

from runs.admin.base import ForAdministrators, Unchangeable
from runs.models import AuditEntry


@admin.register(AuditEntry)
class AuditAdmin(Unchangeable, ForAdministrators):
    list_display = ("at", "actor", "address", "action", "target", "detail")
    list_filter = ("action",)
    search_fields = ("actor", "target", "address")
    date_hierarchy = "at"
