"""Who is told of a run's alerts, and what an hour of a pool's replica may cost at most."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0012_order_by_start")]

    operations = [
        migrations.AddField(
            model_name="run",
            name="notify",
            field=models.JSONField(
                blank=True,
                help_text="Ids of the webhooks that are told of its alerts; null: all there are",
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="replicapool",
            name="max_price_usd_h",
            field=models.FloatField(
                blank=True,
                help_text="What it may cost at most, or it is not taken; null: any",
                null=True,
            ),
        ),
    ]
