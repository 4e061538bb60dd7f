"""Rounds get their strips, their curves, and long series their roll-ups."""

from django.db import migrations, models


def fill(apps, schema_editor):
    # The layout of strips and blocks is told by their own modules: what is stored must be what
    # they read.
    from runs.metrics import downsampling
    from runs.metrics import round_strips

    Round = apps.get_model("runs", "Round")
    Contribution = apps.get_model("runs", "Contribution")
    Block = apps.get_model("runs", "MetricBlock")
    Run = apps.get_model("runs", "Run")
    for run in Run.objects.all().iterator():
        rows = []
        for row in Round.objects.filter(run=run).order_by("number"):
            given = Contribution.objects.filter(round=row).select_related("replica")
            round_strips.put(row, [(c.replica.number, c) for c in given])
            rows.append(row)
        Round.objects.bulk_update(rows, ["outcomes", "timings"], batch_size=50)
        downsampling.add_points(run, None, round_strips.curves(run, rows), key="round", model=Block)
    long = Block.objects.filter(level=0, index__gt=0)
    names = long.values_list("run_id", "replica_id", "series").distinct().order_by()
    for run_id, replica_id, series in names:
        mine = Block.objects.filter(run_id=run_id, replica_id=replica_id, series=series)
        if mine.filter(level__gt=0).exists():
            continue  # made by a version that had them
        downsampling.build(
            run_id, replica_id, series, key="round" if replica_id is None else "step", model=Block
        )


class Migration(migrations.Migration):

    dependencies = [
        ('runs', '0006_run_life'),
    ]

    operations = [
        migrations.AddField(
            model_name='round',
            name='outcomes',
            field=models.BinaryField(default=b'', help_text='One byte per replica'),
        ),
        migrations.AddField(
            model_name='round',
            name='timings',
            field=models.BinaryField(default=b'', help_text='When and how long, per replica'),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]
