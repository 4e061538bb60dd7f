"""Two levels of downsampled blocks instead of eleven: computed again from the points."""

import numpy as np
from django.db import migrations

from runs.metrics.blocks import LEVELS, Points, concatenate, keep, split, width


def rebuild(apps, schema_editor):
    blocks = apps.get_model("runs", "MetricBlock").objects.order_by("index")
    blocks.exclude(level=0).delete()
    names = ("run_id", "replica_id", "series")
    for values in list(blocks.order_by(*names).values(*names).distinct()):
        rows = blocks.filter(**values).values_list("data", flat=True)
        points = concatenate([Points.unpack(bytes(data)) for data in rows])
        key = "round" if values["replica_id"] is None else "step"
        for level in LEVELS:
            below = getattr(points, key) // width(level)
            blocks.bulk_create(
                blocks.model(
                    **values,
                    level=level,
                    index=index,
                    count=np.count_nonzero(below == index),
                    data=part.pack(),
                )
                for index, part in split(keep(points, key, level), key, level)
            )


class Migration(migrations.Migration):
    dependencies = [("runs", "0026_open_circuit_breaker")]

    operations = [migrations.RunPython(rebuild)]
