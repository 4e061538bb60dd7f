"""Rounds know who was healing and how late the late were; replicas, what they use now."""

from django.db import migrations, models

ROWS = 200
LATE = 3  # its place in runs.metrics.round_strips.OUTCOMES


def fill(apps, schema_editor):
    # As in 0007: the layout of strips is told by their own modules.
    from runs.metrics import healing
    from runs.metrics import round_strips

    Round = apps.get_model("runs", "Round")
    Contribution = apps.get_model("runs", "Contribution")
    Event = apps.get_model("runs", "Event")
    Replica = apps.get_model("runs", "Replica")
    for run in apps.get_model("runs", "Run").objects.all().iterator():
        numbers = sorted(Replica.objects.filter(run=run).values_list("number", flat=True))
        moves = healing.moves_of(run, numbers, events=Event.objects)
        last, before = 0, None
        while rows := list(
            Round.objects.filter(run=run, number__gt=last).order_by("number")[:ROWS]
        ):
            for row in rows:
                late = []
                if LATE in bytes(row.outcomes):
                    found = Contribution.objects.filter(round=row, state="late")
                    late = [(c.replica.number, c) for c in found.select_related("replica")]
                    round_strips.put(row, late)
                healed = []
                if row.committed_at is not None:
                    healed = healing.healing(row, before, moves, numbers)
                    round_strips.heal(row, healed)
                    before = row
                if late or healed:
                    row.save(update_fields=["outcomes", "timings", "lateness"])
            last = rows[-1].number


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0014_prices_and_alerts'),
    ]

    operations = [
        migrations.AddField(
            model_name='replica',
            name='gpu_busy',
            field=models.FloatField(blank=True, help_text='0 to 1', null=True),
        ),
        migrations.AddField(
            model_name='replica',
            name='gpu_memory_bytes',
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='replica',
            name='up_bytes_per_s',
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='replica',
            name='down_bytes_per_s',
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='round',
            name='lateness',
            field=models.BinaryField(default=b'', help_text='Seconds, of each that is late'),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]
