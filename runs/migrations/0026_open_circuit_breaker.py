"""The names of the circuit breaker: *open* is the state in which nothing is launched."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("runs", "0001_squashed_0025_waits_and_earlier_costs")]

    operations = [
        migrations.RenameField("ReplicaPool", "closed_until", "open_until"),
        migrations.RenameField("ReplicaPool", "needs_person", "requires_intervention"),
        migrations.RenameField("ReplicaPool", "trouble", "last_error"),
        migrations.RenameField("Alert", "told_at", "notified_at"),
    ]
