"""Named views of the runs list."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models.functions import Lower


class SavedView(models.Model):
    """The query, order, columns and groups of the runs list, as in its URL.

    Only the owner sees a view that is not shared.
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_views"
    )
    name = models.CharField(max_length=80)
    query = models.CharField(max_length=500, blank=True)
    sort = models.CharField(max_length=32, help_text="As in the URL, e.g. -created")
    columns = models.JSONField(default=list, blank=True, help_text="Empty: the default columns")
    differing = models.BooleanField(
        default=False, help_text="Whether the settings that differ between runs are columns"
    )
    group = models.CharField(max_length=16, blank=True, help_text="Groups the runs; empty: none")
    shared = models.BooleanField(default=False, help_text="Whether every user with a role sees it")
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ("name", "id")
        constraints = (
            models.UniqueConstraint("owner", Lower("name"), name="saved_view_name_is_unique"),
        )

    def __str__(self) -> str:
        return self.name
