"""Patterns of allowed pool options, permissions of the local backend, and the audit log."""

from __future__ import annotations

from typing import Any

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

from runs import audit_triggers


def install(apps: Any, editor: Any) -> None:
    audit_triggers.install(editor.connection)


def remove(apps: Any, editor: Any) -> None:
    audit_triggers.remove(editor.connection)


class Migration(migrations.Migration):
    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("runs", "0021_canonical_rendezvous"),
    ]

    operations = [
        migrations.AddField(
            model_name="credential",
            name="allowed_pool_options",
            field=models.JSONField(blank=True, default=dict),
        ),
        migrations.AddField(
            model_name="replicapool",
            name="added_by",
            field=models.ForeignKey(
                blank=True,
                null=True,
                help_text="With whose permissions it runs; null: the run's owner",
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AlterModelOptions(
            name="run",
            options={
                "ordering": ("-created_at", "-id"),
                "permissions": (
                    ("use_local_backend", "Can run replicas on the server itself"),
                    ("run_custom_code_locally", "Can run custom code on the server itself"),
                ),
            },
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("at", models.DateTimeField()),
                ("actor", models.CharField(blank=True, max_length=150)),
                ("address", models.CharField(blank=True, max_length=64)),
                ("action", models.CharField(max_length=64)),
                ("target", models.CharField(blank=True, max_length=200)),
                ("detail", models.TextField(blank=True)),
                ("previous_hash", models.CharField(max_length=64)),
                ("hash", models.CharField(max_length=64, unique=True)),
            ],
            options={"ordering": ("-id",), "verbose_name_plural": "audit log"},
        ),
        migrations.RunPython(install, remove),
    ]
