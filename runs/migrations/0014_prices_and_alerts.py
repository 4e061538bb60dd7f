"""Prices at every launch, and alerts that follow from the tables alone: whether a price was typed,
why a pool is held, that an end has not been told yet, the round that was judged last, and when a
replica fell."""

from django.db import migrations, models


def keep_prices(apps, schema_editor):
    """Whether a price was typed is not known of older pools: each stays as it was."""
    apps.get_model("runs", "ReplicaPool").objects.exclude(price_usd_h=None).update(price_given=True)


class Migration(migrations.Migration):
    dependencies = [("runs", "0013_notify_and_max_price")]

    operations = [
        migrations.AddField(
            model_name="replicapool",
            name="price_given",
            field=models.BooleanField(
                default=False,
                help_text="Somebody typed the price: the catalogue's does not matter",
            ),
        ),
        migrations.AddField(
            model_name="replicapool",
            name="held",
            field=models.TextField(
                blank=True,
                default="",
                help_text="Why its price keeps it from being launched; '': it does not",
            ),
            preserve_default=False,
        ),
        migrations.AlterField(
            model_name="replicapool",
            name="price_usd_h",
            field=models.FloatField(
                blank=True, help_text="Of one replica, as known last; null: not known", null=True
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="end_due",
            field=models.BooleanField(
                default=False, help_text="It has ended, and the alert of that is not made yet"
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="watched_round",
            field=models.PositiveIntegerField(
                default=0, help_text="The newest committed round that alerts were judged by"
            ),
        ),
        migrations.AddField(
            model_name="replica",
            name="fell_at",
            field=models.DateTimeField(
                blank=True,
                help_text="When a job of it was lost or failed; null once it works again",
                null=True,
            ),
        ),
        migrations.RunPython(keep_prices, migrations.RunPython.noop),
    ]
