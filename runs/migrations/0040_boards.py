"""Boards, and groups in saved views."""

import django.db.models.deletion
import django.db.models.functions.text
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0039_retained_spend"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="savedview",
            name="group",
            field=models.CharField(
                blank=True, help_text="Groups the runs; empty: none", max_length=16
            ),
        ),
        migrations.CreateModel(
            name="Board",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=80)),
                (
                    "runs",
                    models.JSONField(
                        blank=True, default=list, help_text="IDs; empty: those of the query"
                    ),
                ),
                ("query", models.CharField(blank=True, max_length=500)),
                ("panels", models.JSONField(blank=True, default=list)),
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
                        related_name="boards",
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
                        name="board_name_is_unique",
                    )
                ],
            },
        ),
    ]
