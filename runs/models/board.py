"""Boards: saved comparisons."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models.functions import Lower


class Board(models.Model):
    """The runs listed in ``runs``, otherwise the newest ones that match ``query``, in charts:
    ``panels`` (:class:`runs.queries.boards.Panel`).

    Only the owner sees a board that is not shared.
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="boards"
    )
    name = models.CharField(max_length=80)
    runs = models.JSONField(default=list, blank=True, help_text="IDs; empty: those of the query")
    query = models.CharField(max_length=500, blank=True)
    panels = models.JSONField(default=list, blank=True)
    shared = models.BooleanField(default=False, help_text="Whether every user with a role sees it")
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ("name", "id")
        constraints = (
            models.UniqueConstraint("owner", Lower("name"), name="board_name_is_unique"),
        )

    def __str__(self) -> str:
        return self.name
