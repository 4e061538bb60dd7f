"""Spending of deleted runs and under earlier tags."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0038_tracker_addresses")]

    operations = [
        migrations.AddField(
            model_name="sweep",
            name="deleted_usd",
            field=models.FloatField(default=0, help_text="Cost of its deleted runs"),
        ),
        migrations.CreateModel(
            name="RetainedSpend",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("run", models.UUIDField(db_index=True)),
                ("run_name", models.CharField(max_length=80)),
                ("owner", models.CharField(help_text="The user name", max_length=150)),
                ("tags", models.JSONField(default=list)),
                (
                    "backend",
                    models.CharField(help_text="Or traffic", max_length=64),
                ),
                ("day", models.DateField(db_index=True, help_text="In UTC")),
                ("usd", models.FloatField(default=0)),
                ("jobs", models.PositiveIntegerField(default=0)),
                ("unpriced_jobs", models.PositiveIntegerField(default=0)),
                ("unpriced_s", models.FloatField(default=0)),
                ("deleted_at", models.DateTimeField()),
            ],
            options={"ordering": ("-day", "-id")},
        ),
        migrations.CreateModel(
            name="TagPeriod",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tags", models.JSONField(default=list)),
                ("until", models.DateTimeField(db_index=True)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="tag_periods",
                        to="runs.run",
                    ),
                ),
            ],
            options={"ordering": ("until", "id")},
        ),
    ]
