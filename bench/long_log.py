"""Seconds to inspect, join and import a group with a long log.

The log is built directly: the records of every round as a group writes them, a manifest of every
checkpoint, and the objects of the newest one. What is measured is the product's own code on a
folder: *inspect* is ``diloco.inspect`` without waiting for heartbeats; *join* constructs a replica,
which loads the newest checkpoint and reads the commits after it; *import* stores the run in the
database of a server, which then answers the requests that open its page. With a latency, every
request and every page of a listing takes that long, as in a bucket.

Usage: python bench/long_log.py [--rounds 10000] [--replicas 8] [--checkpoint-every 10]
       [--import-rounds 1000] [--latency-ms 0] [--single]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from diloco.group import join
from diloco.inspect import inspect
from diloco.model.flat_parameters import Layout
from diloco.model.outer_optimizer import OuterOptimizer
from diloco.protocol import keys
from diloco.protocol.records import CheckpointManifest, StoredObject
from diloco.protocol.round_view import Totals
from diloco.store.base import LISTED, PAGE_OBJECTS, LocalStore, ObjectInfo, Pages, Store
from diloco.training.checkpoint import save_checkpoint
from diloco.training.round_packs import pack_rounds
from tests.diloco.bucket_harness import Harness, filled, who

PAGE_PARTS = (
    "",
    "snapshot.json",
    "series.json?of=norm,tokens_per_s",
    "heatmap.json",
    "timeline.json",
)
"""Requests of the page of a run."""
PAGE_LOADS = 9


class DistantStore:
    """A store that counts the reads, each of which takes ``latency_s`` longer."""

    def __init__(self, inner: Store, latency_s: float) -> None:
        self.inner = inner
        self.uri, self.atomic_create = inner.uri, inner.atomic_create
        self.reads: Counter[str] = Counter()
        self._latency_s = latency_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _request(self, verb: str) -> None:
        self.reads[verb] += 1
        if self._latency_s:
            time.sleep(self._latency_s)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self._request("GET")
        return self.inner.get(key, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._request("GET")
        return self.inner.get_range(key, start, length)

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        found = self.inner.list(prefix, limit=limit)
        for _ in range(0, len(found) or 1, PAGE_OBJECTS):
            self._request("LIST")
        return found

    def list_pages(self, prefix: str) -> Pages:
        for page in self.inner.list_pages(prefix):
            self._request("LIST")
            yield page


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 64)


def build(folder: Path, *, rounds: int, replicas: int, checkpoint_every: int, packed: bool) -> None:
    """Write a log of ``rounds`` rounds with a usable checkpoint after the last one.

    With ``packed``, the writer of each checkpoint packs old records.
    """
    store = LocalStore(folder)
    group = Harness(
        store,
        total_rounds=rounds + 1000,
        num_replicas=replicas,
        start_replicas=1,
        start_wait_s=0.0,
        checkpoint_every=checkpoint_every,
    )
    members = range(replicas)
    for replica in members:
        group.beat(replica, state="left", round=rounds + 1)
    for round in range(1, rounds + 1):
        group.contribute(round, *members, payload=False)
        group.plan(round, *members)
        group.commit(round, *members, tokens_total=100 * replicas * round)
        if round % checkpoint_every or round == rounds:
            continue
        folder_of = keys.checkpoint_dir(round, 0, who(0).incarnation)
        swept = StoredObject(key=f"{folder_of}weights.safetensors", size_bytes=500, sha256="0")
        manifest = filled(CheckpointManifest, round=round, writer=who(0), weights=swept, outer=None)
        store.put(keys.checkpoint_manifest(round), manifest.to_bytes())
        if packed:
            pack_rounds(store)
    layout = Layout(model())
    save_checkpoint(
        store,
        who(0),
        layout,
        round=rounds,
        weights=layout.read(),
        base_rounds=(rounds,),
        outer=OuterOptimizer.of(group.document.settings, layout.numel),
        totals=Totals(committed=rounds, tokens=100 * replicas * rounds),
        wall_s=0.0,
    )


def time_inspect(store: Store) -> float:
    began_s = time.monotonic()
    picture = inspect(store, once=True)
    assert picture.newest is not None
    return time.monotonic() - began_s


def time_join(store: Store, rounds: int) -> float:
    trained = model()
    began_s = time.monotonic()
    with join(
        store.uri,
        model=trained,
        inner_optimizer=torch.optim.SGD(trained.parameters(), lr=0.1),
        replica=0,
        store=store,
    ) as group:
        seconds = time.monotonic() - began_s
        assert group.round == rounds + 1, group.round
    return seconds


def time_import(folder: Path, var: str, store: DistantStore | None) -> tuple[str, float, float]:
    """The id of an imported run, the seconds of its import, and those of its CPU time, which other
    work delays less. ``store`` replaces the one that the server opens."""
    os.environ |= {
        "ARCHIPELAGO_VAR": var,
        "ARCHIPELAGO_RENDEZVOUS_ROOTS": str(folder.parent),
        "DJANGO_SETTINGS_MODULE": "dashboard.settings",
    }
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import call_command

    from runs.ingest import stores
    from runs.restore.import_run import import_run

    if store is not None:
        vars(stores)["open_store"] = lambda uri, environment: store
    call_command("migrate", verbosity=0)
    owner, _ = User.objects.get_or_create(username="bench", is_superuser=True)
    began_s, cpu_s = time.monotonic(), time.process_time()
    run = import_run(folder.as_uri(), owner=owner).run
    return str(run.pk), time.monotonic() - began_s, time.process_time() - cpu_s


def time_page(run: str) -> dict[str, float]:
    """The seconds of the requests that open the page of an imported run, medians of several."""
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client(SERVER_NAME="localhost")
    client.force_login(User.objects.get(username="bench"))
    seconds: dict[str, list[float]] = {}
    for _ in range(1 + PAGE_LOADS):  # the first one loads templates
        for part in PAGE_PARTS:
            began_s = time.monotonic()
            answer = client.get(f"/runs/{run}/{part}")
            assert answer.status_code == 200, (part, answer.status_code)
            seconds.setdefault(part, []).append(time.monotonic() - began_s)
    return {part: statistics.median(taken[1:]) for part, taken in seconds.items()}


def show(rounds: int, what: str, took: str, store: DistantStore | None) -> None:
    reads = store.reads if store is not None else {"GET": "", "LIST": ""}
    print(f"| {rounds:,} | {what} | {took} | {reads['GET']} | {reads['LIST']} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--import-rounds", type=int, default=1_000, help="0: no import")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of each request")
    parser.add_argument("--single", action="store_true", help="do not pack old records")
    given = parser.parse_args()
    print("| rounds | what | seconds | GET | LIST |\n| ---: | --- | ---: | ---: | ---: |")
    shape = {
        "replicas": given.replicas,
        "checkpoint_every": given.checkpoint_every,
        "packed": not given.single,
    }
    with tempfile.TemporaryDirectory() as root:
        short = Path(root).resolve() / "short"
        build(short, rounds=20, **shape)
        time_join(LocalStore(short), 20)  # imports
        folder = Path(root).resolve() / "runs" / "long"
        build(folder, rounds=given.rounds, **shape)
        latency_s = given.latency_ms / 1000
        for name in ("inspect", "join"):
            store = DistantStore(LocalStore(folder), latency_s)
            took_s = time_inspect(store) if name == "inspect" else time_join(store, given.rounds)
            show(given.rounds, name, f"{took_s:.2f}", store)
        if given.import_rounds:
            folder = Path(root).resolve() / "runs" / "imported"
            build(folder, rounds=given.import_rounds, **shape)
            far = DistantStore(LocalStore(folder), latency_s) if latency_s else None
            run, took_s, cpu_s = time_import(folder, f"{root}/var", far)
            show(given.import_rounds, "import", f"{took_s:.2f} ({cpu_s:.2f} CPU)", far)
            for part, part_s in time_page(run).items():
                show(given.import_rounds, f"page: {part or 'HTML'}", f"{part_s:.3f}", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
