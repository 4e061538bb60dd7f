"""Sweeps, and the place of a run in one."""

import django.core.validators
import django.db.models.deletion
import uuid
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0034_price_limits"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="run",
            name="sweep_held",
            field=models.BooleanField(
                default=False, help_text="Not launched until the limits of its sweep allow it"
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="sweep_index",
            field=models.PositiveIntegerField(default=0, help_text="Its place in its sweep"),
        ),
        migrations.AddField(
            model_name="run",
            name="sweep_values",
            field=models.JSONField(blank=True, default=dict, help_text="Swept field -> value"),
        ),
        migrations.CreateModel(
            name="Sweep",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=uuid.uuid4, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("name", models.CharField(max_length=80)),
                ("parameters", models.JSONField()),
                ("metric", models.CharField(help_text="Ranks the runs", max_length=32)),
                ("parallel", models.PositiveIntegerField(default=0, help_text="0 means no limit")),
                (
                    "budget_usd",
                    models.FloatField(
                        default=0,
                        help_text="Of all its runs; 0 means no limit",
                        validators=[
                            django.core.validators.MinValueValidator(0.0),
                            django.core.validators.MaxValueValidator(1000000000000.0),
                        ],
                    ),
                ),
                ("submit_key", models.CharField(max_length=64, unique=True)),
                ("created_at", models.DateTimeField()),
                (
                    "owner",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="sweeps",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ("-created_at", "-id"),
            },
        ),
        migrations.AddField(
            model_name="run",
            name="sweep",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="runs",
                to="runs.sweep",
            ),
        ),
        migrations.AddIndex(
            model_name="sweep",
            index=models.Index(fields=["-created_at", "-id"], name="sweep_newest"),
        ),
    ]
