"""Named layouts of a run's charts."""

import django.db.models.deletion
import django.db.models.functions.text
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0040_boards"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="RunView",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=80)),
                (
                    "panels",
                    models.CharField(
                        blank=True,
                        help_text="Panels that differ, e.g. loss.l,-cosine",
                        max_length=4000,
                    ),
                ),
                ("x", models.CharField(help_text="The horizontal axis", max_length=16)),
                (
                    "smooth",
                    models.FloatField(
                        blank=True, help_text="Empty: the usual smoothing", null=True
                    ),
                ),
                (
                    "log",
                    models.CharField(
                        blank=True, help_text="Logarithmic axes: x, y or xy", max_length=2
                    ),
                ),
                (
                    "clip",
                    models.BooleanField(
                        blank=True, help_text="Empty: of charts that end in NaN", null=True
                    ),
                ),
                (
                    "shared",
                    models.BooleanField(
                        default=False, help_text="Whether every user with a role sees it"
                    ),
                ),
                ("changed_at", models.DateTimeField()),
                (
                    "owner",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="run_views",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={
                "ordering": ("name", "id"),
                "constraints": [
                    models.UniqueConstraint(
                        models.F("owner"),
                        django.db.models.functions.text.Lower("name"),
                        name="run_view_name_is_unique",
                    )
                ],
            },
        ),
    ]
