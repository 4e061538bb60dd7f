"""Orphaned jobs, and an index of the ends of attempts."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("runs", "0027_metric_levels"),
    ]

    operations = [
        migrations.CreateModel(
            name="OrphanJob",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "key",
                    models.CharField(
                        help_text="Digest of backend and handle", max_length=64, unique=True
                    ),
                ),
                ("backend", models.CharField(max_length=32)),
                ("launch_key", models.CharField(max_length=80)),
                (
                    "url",
                    models.CharField(
                        blank=True, help_text="Its page in the backend's console", max_length=500
                    ),
                ),
                ("reason", models.CharField(max_length=80)),
                (
                    "billed_from",
                    models.DateTimeField(
                        help_text="End of its attempt, or the first time that the reaper found it"
                    ),
                ),
                ("first_seen_at", models.DateTimeField()),
                ("seen_at", models.DateTimeField(help_text="When the reaper last found it")),
            ],
            options={
                "ordering": ("-id",),
            },
        ),
        migrations.AddIndex(
            model_name="replicaattempt",
            index=models.Index(fields=["ended_at"], condition=models.Q(ended_at__isnull=False), name="attempt_ended"),
        ),
        migrations.AddField(
            model_name="orphanjob",
            name="attempt",
            field=models.ForeignKey(
                blank=True,
                help_text="The attempt with its launch key, if there is one",
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="runs.replicaattempt",
            ),
        ),
        migrations.AddField(
            model_name="orphanjob",
            name="credential",
            field=models.ForeignKey(
                blank=True,
                help_text="Null: the server's own environment",
                null=True,
                on_delete=django.db.models.deletion.CASCADE,
                related_name="+",
                to="runs.credential",
            ),
        ),
    ]
