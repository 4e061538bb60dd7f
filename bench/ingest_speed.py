"""How many telemetry values one worker stores in a second, sustained.

Replicas' segments lie in a folder beforehand; what is measured is the ingest of the reconciler, as
it is: segments read, parsed and checked, points and roll-ups merged, contributions, log lines and
the cursors stored, a transaction per tick. A value is one number of a series (loss, learning rate,
gradient norm, seconds of a step). *Live* ticks find one or two segments per replica,
as when a run is watched; a *backlog* is worked off forty at a time. *Steps before* were stored
earlier, so that series have roll-ups to keep up.

Usage: python bench/ingest_speed.py [--database postgresql] [--replicas 8] [--steps 50]
       [--segments 120]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SERIES = ("loss", "lr", "grad_norm", "step_s")
ROUNDS = 10_000
"""The next round of the run: telemetry of later rounds is refused."""


def prepare(replicas: int, after: int) -> Any:
    """A running run whose replicas have ``after`` steps of every series."""
    import numpy as np
    from django.contrib.auth.models import User
    from django.utils import timezone

    from diloco.protocol.settings import GroupSettings
    from diloco.protocol.workload import ByteGPTWorkload
    from runs.metrics.blocks import Points
    from runs.metrics.downsampling import add_points
    from runs.submit.create import create_run
    from runs.submit.run_draft import PoolDraft, RunDraft

    owner, _ = User.objects.get_or_create(username="bench", is_superuser=True)
    draft = RunDraft(
        name="ingest",
        settings=GroupSettings(num_replicas=replicas, max_replicas=replicas, sync_every=100),
        workload=ByteGPTWorkload(),
        pools=(PoolDraft(count=replicas),),
    )
    run = create_run(draft, owner=owner, submit_key=uuid.uuid4().hex)
    run.first_step_at = timezone.now()
    run.next_round = ROUNDS
    run.save()
    step = np.arange(1, after + 1)
    points = Points(
        step=step,
        round=(step // 100).astype("i4"),
        tokens=step * 1000,
        wall_s=1.7e9 + step * 0.1,
        value=np.sin(step / 9.0),
    )
    for replica in run.replicas.all() if after else ():
        add_points(run, replica, dict.fromkeys(SERIES, points), key="step")
    return run


def write_segments(store: Any, replicas: int, segments: int, steps: int, after: int) -> None:
    from diloco.protocol import keys
    from diloco.protocol.telemetry import LogLine, RoundReport, Segment, StepColumns

    for replica in range(replicas):
        for n in range(1, segments + 1):
            first = after + 1 + (n - 1) * steps
            taken = range(first, first + steps)
            values = tuple(2.0 + (s % 97) / 100 for s in taken)
            reports = tuple(
                RoundReport(
                    round=s // 100,
                    outcome="included",
                    started_wall_s=1.7e9 + s * 0.1 - 10,
                    committed_wall_s=1.7e9 + s * 0.1,
                    phases={"compute": 8.0, "upload": 1.0, "wait": 0.5, "apply": 0.2},
                    bytes_up=10**6,
                    bytes_down=10**6,
                    requests=9,
                    norm=1.0,
                    update_norm=0.5,
                    contributors=replicas,
                    weights_digest="d" * 64,
                )
                for s in taken
                if s % 100 == 0
            )
            segment = Segment(
                replica=replica,
                incarnation=name(replica),
                n=n,
                wall_s=1.7e9,
                state="computing",
                round=first // 100,
                steps=StepColumns(
                    step=tuple(taken),
                    round=tuple(s // 100 for s in taken),
                    wall_s=tuple(1.7e9 + s * 0.1 for s in taken),
                    tokens=tuple(s * 1000 for s in taken),
                    loss=values,
                    lr=values,
                    grad_norm=values,
                    step_s=values,
                ),
                rounds=reports,
                logs=(LogLine(wall_s=1.7e9, level="info", message=f"segment {n}"),),
            )
            store.put(keys.telemetry(replica, name(replica), n), segment.to_bytes())


def name(replica: int) -> str:
    return f"00001-{replica:08x}"


def measure(
    replicas: int, segments: int, steps: int, after: int, per_tick: int
) -> tuple[float, float]:
    """Values per second until every segment is in the tables: by the clock, and by the processor
    time of this process and its database."""
    from django.utils import timezone

    from bench.processor import spent_s
    from runs.ingest import telemetry
    from runs.ingest.stores import store_for
    from runs.metrics.changes import Changes
    from runs.models import MetricBlock

    run = prepare(replicas, after)
    store = store_for(run)
    write_segments(store, replicas, segments, steps, after)
    telemetry.SEGMENTS_PER_TICK = per_tick
    seen = [(n, name(n)) for n in range(replicas)]
    begun, spent = time.perf_counter(), spent_s()
    for _ in range(-(-segments // per_tick)):
        run.refresh_from_db()
        telemetry.ingest_telemetry(
            run,
            store,
            list(run.replicas.all()),
            seen,
            ended=frozenset(),
            now=timezone.now(),
            changes=Changes(),
        )
    took, spent = time.perf_counter() - begun, spent_s() - spent
    rows = MetricBlock.objects.filter(run=run, level=0, replica__isnull=False)
    stored = sum(rows.values_list("count", flat=True))
    expected = replicas * (segments * steps + after) * len(SERIES)
    if stored != expected:
        raise SystemExit(f"expected {expected} values in the tables, found {stored}")
    values = replicas * segments * steps * len(SERIES)
    return values / took, values / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--segments", type=int, default=120)
    parser.add_argument("--steps", type=int, default=50, help="of one segment")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    from bench.chart_speed import database

    with tempfile.TemporaryDirectory() as folder, database(options.database):
        os.environ |= {"ARCHIPELAGO_VAR": folder, "DJANGO_SETTINGS_MODULE": "dashboard.settings"}
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        print(f"{options.database}: {options.replicas} replicas, segments of {options.steps} steps")
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
        print("\n| ticks | steps before | values/s (range) | per s of processor time |")
        print("| --- | ---: | ---: | ---: |")
        for label, per_tick in (
            ("backlog, 40 segments", 40),
            ("live, 2 segments", 2),
            ("live, 1 segment", 1),
        ):
            for after in (0, 100_000):
                found = [
                    measure(options.replicas, options.segments, options.steps, after, per_tick)
                    for _ in range(options.repeat)
                ]
                rates, own = (sorted(column) for column in zip(*found, strict=True))
                middle, of_own = rates[len(rates) // 2], own[len(own) // 2]
                spread = f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
                print(
                    f"| {label} | {after:,} | {middle:,.0f} ({spread}) | {of_own:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
