"""Credentials for backends and buckets, encrypted with a key outside the database."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class Credential(models.Model):
    """A named set of secrets for one backend or bucket.

    Secrets are write-only: pages show ``fields`` (the names), never the values.

    Attributes:
        kind: a backend (:data:`executors.registry.BACKENDS`), or ``store`` for a bucket.
        sealed: JSON object of environment variable names and values, encrypted by
            :mod:`runs.credentials`.
        options: settings that are not secret, such as namespace, role and region.
        allowed_pool_options: options that a pool can override
            (:mod:`runs.credentials.restrictions`).
    """

    name = models.CharField(max_length=80, unique=True)
    kind = models.CharField(max_length=32)
    sealed = models.TextField(editable=False)
    fields = models.JSONField(default=list, editable=False)
    options = models.JSONField(default=dict, blank=True)
    allowed_pool_options = models.JSONField(default=dict, blank=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, editable=False
    )
    created_at = models.DateTimeField(editable=False)
    changed_at = models.DateTimeField(editable=False)
    tested_at = models.DateTimeField(null=True, blank=True, editable=False)
    test_ok = models.BooleanField(null=True, editable=False)
    test_message = models.TextField(blank=True, editable=False)

    class Meta:
        ordering = ("kind", "name")

    def __str__(self) -> str:
        return self.name
