"""Named layouts of a run's charts."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models.functions import Lower


class RunView(models.Model):
    """The panels of a run's overview and the options of their charts, as in its address
    (:class:`runs.queries.panel_layout.PanelLayout`). It applies to every run.

    Only the owner sees a view that is not shared.
    """

    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="run_views"
    )
    name = models.CharField(max_length=80)
    panels = models.CharField(
        max_length=4000, blank=True, help_text="Panels that differ, e.g. loss.l,-cosine"
    )
    x = models.CharField(max_length=16, help_text="The horizontal axis")
    smooth = models.FloatField(null=True, blank=True, help_text="Empty: the usual smoothing")
    log = models.CharField(max_length=2, blank=True, help_text="Logarithmic axes: x, y or xy")
    clip = models.BooleanField(null=True, blank=True, help_text="Empty: of charts that end in NaN")
    shared = models.BooleanField(default=False, help_text="Whether every user with a role sees it")
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ("name", "id")
        constraints = (
            models.UniqueConstraint("owner", Lower("name"), name="run_view_name_is_unique"),
        )

    def __str__(self) -> str:
        return self.name
