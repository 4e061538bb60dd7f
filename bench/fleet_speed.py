"""How long the fleet and the page of spending take with many live jobs, and how many queries.

Pages are asked for as in ``bench/runs_list_speed.py``. Runs of ten replicas each belong to a
hundred owners and five backends; each replica has one live job and ``--ended`` ended ones in the
last 30 days. One pool in fifty has trouble, one replica in twenty waits for a machine. *Processor*
is the mean of a request, in ms, of this process and its database's.

Usage: python bench/fleet_speed.py [--jobs 1000 5000] [--ended 5] [--database postgresql]
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.runs_list_speed import OWNERS, analyze, database, measure

REPLICAS = 10
BATCH = 100
BACKENDS = ("local", "modal", "huggingface", "sagemaker", "kubernetes")
STATES = ("computing", "computing", "waiting", "uploading", "provisioning")
PRICES = (0.0, 3.95, 1.5, None, 0.8)
HOUR = datetime.timedelta(hours=1)


def fill(wanted: int, ended: int) -> None:
    """Add runs until there are ``wanted`` live jobs."""
    from django.contrib.auth.models import User
    from django.utils import timezone

    from diloco.protocol.settings import GroupSettings
    from runs.models import Replica, ReplicaAttempt, ReplicaPool, Run

    if not User.objects.exists():
        User.objects.bulk_create([User(username=f"user{n}") for n in range(OWNERS)])
    owners = list(User.objects.filter(username__startswith="user"))
    settings = GroupSettings(num_replicas=REPLICAS).to_dict()
    now = timezone.now()
    for first in range(Run.objects.count(), wanted // REPLICAS, BATCH):
        numbers = range(first, min(first + BATCH, wanted // REPLICAS))
        runs = Run.objects.bulk_create(
            Run(
                name=f"run {n}",
                owner=owners[n % OWNERS],
                state="running",
                state_since=now,
                created_at=now,
                started_at=now,
                rendezvous=f"s3://bucket/runs/{n}",
                group_settings=settings,
                workload={},
                tags=[f"tag{n % 30}"],
                submit_key=uuid.uuid4().hex,
            )
            for n in numbers
        )
        pools = ReplicaPool.objects.bulk_create(
            ReplicaPool(
                run=run,
                backend=BACKENDS[n % 5],
                hardware="H100",
                region="eu-central-1",
                count=REPLICAS,
                price_usd_h=PRICES[n % 5],
                failures=4 * (n % 50 == 0),
                last_error="quota exceeded: 8 x H100" if n % 50 == 0 else "",
            )
            for n, run in zip(numbers, runs, strict=True)
        )
        replicas = Replica.objects.bulk_create(
            Replica(
                run=run,
                pool=pool,
                number=number,
                state=STATES[number % 5],
                pending_cause="capacity" if number % 20 == 9 else "",
                state_since=now,
            )
            for run, pool in zip(runs, pools, strict=True)
            for number in range(REPLICAS)
        )
        ReplicaAttempt.objects.bulk_create(
            (
                _attempt(replica, number, ended + 1, now)
                for replica in replicas
                for number in range(1, ended + 2)
            ),
            batch_size=2000,
        )


def _attempt(replica, number: int, last: int, now: datetime.datetime):  # type: ignore[no-untyped-def]
    from runs.models import ReplicaAttempt

    price = replica.pool.price_usd_h
    start = now - (last - number) * 720 * HOUR / last - 2 * HOUR
    end = None if number == last else start + 9 * HOUR
    return ReplicaAttempt(
        replica=replica,
        number=number,
        launch_key=uuid.uuid4().hex,
        handle={"backend": replica.pool.backend, "launch_key": "", "data": {"id": "sb-1"}},
        created_at=start,
        launched_at=start,
        started_at=None if end is None and replica.number % 20 == 9 else start,
        ended_at=end,
        price_usd_h=price,
        cost_usd=None if price is None else price * ((end or now) - start) / HOUR,
    )


def deep_path() -> str:
    """The page in the middle."""
    from runs.models import ReplicaAttempt

    jobs = ReplicaAttempt.objects.filter(ended_at=None).order_by("-replica_id")
    job = jobs[jobs.count() // 2]
    return f"/fleet?before={job.replica_id}_{job.pk}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--ended", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    options = parser.parse_args()
    is_postgres = options.database == "postgresql"
    name = "PostgreSQL" if is_postgres else "SQLite"
    with tempfile.TemporaryDirectory() as folder, database(Path(folder), postgres=is_postgres):
        print("| database | live jobs | page | queries | KB | p50, ms | p95 | max | processor |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for wanted in options.jobs:
            fill(wanted, options.ended)
            analyze()
            for page, path in (
                ("fleet", "/fleet"),
                ("fleet, the middle", deep_path()),
                ("fleet, polled", "/fleet?part=1"),
                ("fleet, one backend and owner", "/fleet?backend=modal&owner=user1"),
                ("fleet, one state", "/fleet?state=provisioning"),
                ("fleet, API", "/api/fleet"),
                ("spend, 7 days", "/spend"),
                ("spend, 30 days", "/spend?days=30"),
            ):
                took, processor, queries, size = measure(path, options.repeat)
                p50, p95 = (took[int(len(took) * share)] for share in (0.5, 0.95))
                print(
                    f"| {name} | {wanted:,} | {page} | {queries} | {size / 1000:.0f} | {p50:.0f} "
                    f"| **{p95:.0f}** | {took[-1]:.0f} | {processor:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
