"""Evaluations: since when an unavailable backend or bucket is retried."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0036_evaluations")]

    operations = [
        migrations.AddField(
            model_name="evaluation",
            name="retrying_since",
            field=models.DateTimeField(blank=True, null=True),
        ),
    ]
