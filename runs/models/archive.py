"""Code that users upload."""

from __future__ import annotations

from django.db import models


class Archive(models.Model):
    """A zip of user code, named by its hash, kept until launches have copied it into buckets."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    data = models.BinaryField()
    created_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.sha256[:12]
