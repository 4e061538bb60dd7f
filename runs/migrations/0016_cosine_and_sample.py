"""Contributions know their cosine to the mean of the round, results a sample of text."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0015_healing_lateness_usage")]

    operations = [
        migrations.AddField(
            model_name="contribution",
            name="cosine",
            field=models.FloatField(blank=True, help_text="To the mean that took it in", null=True),
        ),
        migrations.AddField(
            model_name="round",
            name="cosines",
            field=models.BinaryField(default=b"", help_text="Of each replica, to the mean"),
        ),
        migrations.AddField(
            model_name="checkpoint",
            name="sample",
            field=models.JSONField(
                blank=True, help_text="Text from the final weights of a language model", null=True
            ),
        ),
    ]
