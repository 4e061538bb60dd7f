"""Indexes for the totals of the runs list: open alerts, the runs that ran today, and jobs of
evaluations that run or ended today."""

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
        migrations.AddIndex(
            model_name="run", index=models.Index(fields=["ended_at"], name="run_ended")
        ),
        migrations.AddIndex(
            model_name="evaluationattempt",
            index=models.Index(
                fields=["evaluation"],
                condition=Q(("ended_at__isnull", True)),
                name="evaluation_attempt_open",
            ),
        ),
        migrations.AddIndex(
            model_name="evaluationattempt",
            index=models.Index(
                fields=["ended_at"],
                condition=Q(("ended_at__isnull", False)),
                name="evaluation_attempt_ended",
            ),
        ),
    ]
