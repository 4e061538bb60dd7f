"""How long a replica has waited for any cause, and what an attempt cost before it was suspended."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = (("runs", "0024_audit_replace"),)

    operations = (
        migrations.AddField(
            model_name="replica",
            name="waiting_since",
            field=models.DateTimeField(
                blank=True,
                help_text="Since when it has waited outside of a queue, any cause",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="replicaattempt",
            name="earlier_cost_usd",
            field=models.FloatField(
                default=0.0, help_text="Of the times it ran before its queue suspended it"
            ),
        ),
    )
