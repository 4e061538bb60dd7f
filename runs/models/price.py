"""Prices that administrators set: of hardware, and of traffic of buckets."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from runs.models import money


class PriceOverride(models.Model):
    """Prices of one hardware, in place of those of the catalogue. Null keeps the catalogue's."""

    backend = models.CharField(max_length=32)
    hardware = models.CharField(max_length=64)
    price_usd_h = models.FloatField(validators=money.PRICE, null=True, blank=True)
    spot_price_usd_h = models.FloatField(validators=money.PRICE, null=True, blank=True)
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, related_name="+"
    )
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ("backend", "hardware")
        constraints = (
            models.UniqueConstraint(fields=["backend", "hardware"], name="price_is_unique"),
        )

    def __str__(self) -> str:
        return f"{self.backend} {self.hardware}"


class TrafficPrice(models.Model):
    """Prices of replicas' traffic with one kind of bucket, for estimates."""

    scheme = models.CharField(max_length=8, unique=True, help_text="Of URIs, e.g. s3")
    upload_usd_gb = models.FloatField(help_text="Replica to bucket, USD per 10^9 bytes")
    download_usd_gb = models.FloatField(help_text="Bucket to replica, USD per 10^9 bytes")
    requests_usd_million = models.FloatField(help_text="USD per 10^6 requests")
    changed_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, related_name="+"
    )
    changed_at = models.DateTimeField()

    class Meta:
        ordering = ("scheme",)

    def __str__(self) -> str:
        return self.scheme
