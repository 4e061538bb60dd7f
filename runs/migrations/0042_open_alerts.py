"""An index of the open alerts, which the list of runs counts."""

from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    dependencies = [("runs", "0041_run_views")]

    operations = [
        migrations.AddIndex(
            model_name="alert",
            index=models.Index(
                fields=["run"], condition=Q(("closed_at__isnull", True)), name="alert_open"
            ),
        ),
    ]
