"""Whether each point of a run reaches MLflow once while the mirroring process is killed again and
again.

A real MLflow server with its SQLite store, a run whose points grow, and a process that makes passes
of :func:`runs.trackers.mirror.mirror` until it gets SIGKILL after a random time. At the end the
points in MLflow's database are compared with the run's export, value by value.

Usage: python bench/mirror_kills.py [--kills 40] [--replicas 4] [--steps 40000] [--seed 0]
The packages of ``requirements/tracker-servers.txt`` are installed into ``.venv/tracker-servers``.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PER_ROUND = 100


def set_up(folder: str) -> None:
    os.environ |= {
        "ARCHIPELAGO_VAR": folder,
        "ARCHIPELAGO_ALLOWED_ADDRESSES": "127.0.0.1",
        "DJANGO_SETTINGS_MODULE": "dashboard.settings",
    }
    import django

    django.setup()


def pass_for_ever(folder: str, mirror_id: str) -> None:
    """The process that is killed."""
    set_up(folder)
    from django.utils import timezone

    from runs.models import RunMirror
    from runs.trackers import mirror

    print("ready", flush=True)
    while True:
        RunMirror.objects.filter(pk=mirror_id).update(next_at=timezone.now())
        mirror.mirror(mirror_id)
        if RunMirror.objects.get(pk=mirror_id).outcome_sent:
            return


def grow(run: Any, first: int, last: int) -> None:
    from bench.ingest_speed import SERIES
    from runs.metrics.blocks import Points
    from runs.metrics.downsampling import add_points
    from runs.models import Run

    steps = list(range(first, last))
    points = Points.of(
        step=steps,
        round=[1 + step // PER_ROUND for step in steps],
        tokens=[1000 * step for step in steps],
        wall_s=[1.7e9 + step for step in steps],
        value=[math.nan if step % 977 == 0 else math.sin(step) for step in steps],
    )
    for replica in run.replicas.all():
        add_points(run, replica, dict.fromkeys(SERIES, points), key="step")
    Run.objects.filter(pk=run.pk).update(next_round=1 + last // PER_ROUND)


def exported(run: Any) -> dict[tuple[str, int], float]:
    from runs.queries.exports import points_of

    result = {}
    for chunk in points_of(run):
        for series, replica, step, value in zip(
            *(chunk[name] for name in ("series", "replica", "step", "value")), strict=True
        ):
            result[f"replica/{replica}/{series}", step] = value
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        pass_for_ever(*options.child)
        return
    from tests.emulators.serving import free_ports
    from tests.tracker_servers import running, tracker_python

    python, [port] = tracker_python(), free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/store.db"]
        with running(command, f"{url}/health", folder / "log"):
            trial(options, folder, url)


def trial(options: argparse.Namespace, folder: Path, url: str) -> None:
    set_up(str(folder))
    from django.core.management import call_command
    from django.utils import timezone

    call_command("migrate", verbosity=0)
    from bench.ingest_speed import prepare
    from diloco.trackers.opening import Destination
    from runs.actions import trackers
    from runs.models import Run, RunMirror

    run = prepare(options.replicas, 0)
    target = Destination(kind="mlflow", server=url, project="kills")
    trackers.save_tracker("mlflow", target, secrets={}, actor=run.owner)
    trackers.mirror_run(run, "mlflow", actor=run.owner)
    mirror_id = str(RunMirror.objects.get(run=run).pk)
    child = [sys.executable, __file__, "--child", str(folder), mirror_id]
    rng, began = random.Random(options.seed), time.monotonic()
    share = options.steps // options.kills // PER_ROUND * PER_ROUND
    delivering = 0
    for kill in range(options.kills):
        grow(run, kill * share, (kill + 1) * share)
        process = subprocess.Popen(child, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it makes passes from now on
        time.sleep(rng.uniform(0.0, 1.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        delivering += RunMirror.objects.get(pk=mirror_id).pending is not None
    Run.objects.filter(pk=run.pk).update(state="succeeded", ended_at=timezone.now())
    subprocess.run(child, check=True)
    with sqlite3.connect(folder / "store.db") as store:
        rows = store.execute("SELECT key, step, value, is_nan FROM metrics").fetchall()
        runs = store.execute("SELECT COUNT(*) FROM runs").fetchone()[0]
    found = {(key, step): math.nan if nan else value for key, step, value, nan in rows}
    expected = exported(run)
    wrong = sum(
        found[place] != value and not (math.isnan(value) and math.isnan(found[place]))
        for place, value in expected.items()
        if place in found
    )
    print(
        f"{options.kills} kills, {delivering} of them during a delivery, in "
        f"{time.monotonic() - began:.0f} s; {len(expected):,} points: "
        f"{len(expected.keys() - found.keys())} missing, {len(rows) - len(found)} twice, "
        f"{len(found.keys() - expected.keys())} unknown, {wrong} with another value; "
        f"{runs} run in MLflow"
    )


if __name__ == "__main__":
    main()
