"""Groups in saved views."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("runs", "0039_retained_spend")]

    operations = [
        migrations.AddField(
            model_name="savedview",
            name="group",
            field=models.CharField(
                blank=True, help_text="Groups the runs; empty: none", max_length=16
            ),
        ),
    ]
