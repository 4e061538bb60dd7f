"""Why a replica has not started yet, and since when; longer words of backends for its state."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = (("runs", "0022_security"),)

    operations = (
        migrations.AlterField(
            model_name="replica",
            name="backend_state",
            field=models.CharField(
                blank=True, help_text="What the backend says, not what we conclude", max_length=64
            ),
        ),
        migrations.AddField(
            model_name="replica",
            name="pending_cause",
            field=models.CharField(
                blank=True, help_text="Why its job has not started yet", max_length=16
            ),
        ),
        migrations.AddField(
            model_name="replica",
            name="pending_since",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AlterField(
            model_name="replicaattempt",
            name="launched_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When everything that its job needs had been created",
                null=True,
            ),
        ),
    )
