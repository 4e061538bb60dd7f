"""``python -m diloco.inspect URI`` and ``diloco.inspect(uri)``: the state of a run from its bucket
alone.

    python -m diloco.inspect s3://bucket/run --last 50
    python -m diloco.inspect s3://bucket/run --rounds 100-120 --json
    python -m diloco.inspect s3://bucket/run --watch

Needs neither torch nor the dashboard, and writes nothing. Whether a replica is alive cannot be
derived from timestamps (invariant I5), so the leases are read until each has changed or a heartbeat
is overdue; with ``--once`` they are read once, and that remains unknown. Exit status: 1 if the
store failed, 2 for an invalid option or if there is no run that this version can read.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diloco.callable_module import CallableModule
from diloco.clock import Clock, SystemClock
from diloco.command_line import add_common_options, finite_json
from diloco.error_lines import print_error
from diloco.inspection.findings import findings
from diloco.inspection.leases import LeaseWatch
from diloco.inspection.picture import Picture
from diloco.inspection.reading import NotARun, Scope, read_document, read_picture
from diloco.inspection.rendering import render
from diloco.protocol.group_document import PROTOCOL
from diloco.store.base import Store, StoreDenied, StoreError
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore

THREADS = 16
PATIENCE_S = 20.0
"""For how long a failed request is retried."""


def rounds(text: str) -> tuple[int, int | None]:
    """Parse a range of rounds: ``A-B``, ``A-`` or ``A``."""
    match = re.fullmatch(r"(\d+)(-(\d*))?", text)
    if match is None or int(match[1]) < 1 or (match[3] and int(match[3]) < int(match[1])):
        raise argparse.ArgumentTypeError(f"expected rounds such as 5-9, 5- or 5, found {text!r}")
    return int(match[1]), (int(match[3]) if match[3] else None) if match[2] else int(match[1])


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.inspect", description="Show a run from its bucket alone."
    )
    add_common_options(parser)
    add = parser.add_argument
    add("uri", help="rendezvous URI of the run, or its folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=count, default=20, help="newest rounds to show (20)")
    which.add_argument("--rounds", type=rounds, help="rounds to show: A-B, A- or A")
    add("--settings", action="store_true", help="show all settings, not only the changed ones")
    add("--sizes", action="store_true", help="show the size of all objects; lists the whole bucket")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--once", action="store_true", help="read the leases only once")
    mode.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    add("--json", action="store_true", help="print one JSON document")
    return parser


def inspect(
    run: str | Store,
    *,
    scope: Scope | None = None,
    once: bool = False,
    clock: Clock | None = None,
) -> Picture:
    """Read the state of a run; needs no torch and writes nothing.

    Args:
        run: rendezvous URI of the run, e.g. ``s3://bucket/run``, or its open store.
        scope: the rounds to read, by default the newest 20.
        once: read the leases once, so that it remains unknown which replicas are alive. Otherwise
            they are read until each has changed, has ended, or misses a heartbeat.
        clock: source of time, for tests.

    Returns a frozen :class:`~diloco.inspection.picture.Picture`: settings, leases, rounds,
    evaluations, checkpoints and the result.

    Raises:
        NotARun: ``run`` has no run that this version can read.
        StoreError: the store is unavailable or denies access.
    """
    clock = clock or SystemClock()
    store = _open(run, clock) if isinstance(run, str) else run
    document = read_document(store)
    with ThreadPoolExecutor(THREADS) as pool:
        timeout_s = document.settings.heartbeat_timeout_s
        watch = LeaseWatch(store, pool, clock=clock, timeout_s=timeout_s)
        leases = watch.look() if once else watch.look_until_known()
        picture = read_picture(store, document, pool, scope=scope or Scope(), leases=leases)
    return _with_watch(picture, watch)


def _open(uri: str, clock: Clock) -> Store:
    return RetryingStore(open_store(uri), clock=clock, rng=random.Random(0), deadline_s=PATIENCE_S)


def _with_watch(picture: Picture, watch: LeaseWatch) -> Picture:
    return dataclasses.replace(
        picture,
        incarnations=watch.incarnations,
        unreadable=(*watch.unreadable, *picture.unreadable),
    )


def document(picture: Picture) -> dict[str, Any]:
    """Return the document that ``--json`` prints. Non-finite numbers become null."""
    body = dataclasses.asdict(picture)
    body["document"] = json.loads(picture.document.to_bytes())
    for shown, line in zip(picture.rounds, body["rounds"], strict=True):
        line["state"] = shown.state
        line["marks"] = {str(r): picture.mark(r, shown) for r in picture.replicas}
    body["findings"] = [dataclasses.asdict(finding) for finding in findings(picture)]
    cleaned = finite_json(body)
    assert isinstance(cleaned, dict)
    return {"format": "archipelago.inspection", "protocol": PROTOCOL, **cleaned}


def _watch(store: Store, arguments: argparse.Namespace, scope: Scope, clock: Clock) -> None:
    """Print the run repeatedly; one lease watch observes all refreshes."""
    group = read_document(store)
    with ThreadPoolExecutor(THREADS) as pool:
        timeout_s = group.settings.heartbeat_timeout_s
        watch = LeaseWatch(store, pool, clock=clock, timeout_s=timeout_s)
        while True:
            picture = read_picture(store, group, pool, scope=scope, leases=watch.look())
            picture = _with_watch(picture, watch)
            print("\033[H\033[2J" + _text(picture, arguments), end="", flush=True)
            if picture.over and not watch.pause_s(picture.leases):
                return
            clock.sleep(watch.pause_s(picture.leases) or 2.0)


def _text(picture: Picture, arguments: argparse.Namespace) -> str:
    if arguments.json:
        return json.dumps(document(picture), indent=2, allow_nan=False) + "\n"
    return render(picture, all_settings=arguments.settings)


def main(argv: list[str] | None = None, *, clock: Clock | None = None) -> int:
    arguments = _parser().parse_args(argv)
    clock = clock or SystemClock()
    first, last = arguments.rounds or (None, None)
    scope = Scope(first=first, last=last, newest=arguments.last, whole=arguments.sizes)
    try:
        store = _open(arguments.uri, clock)
        if arguments.watch:
            _watch(store, arguments, scope, clock)
        else:
            picture = inspect(store, scope=scope, once=arguments.once, clock=clock)
            print(_text(picture, arguments), end="")
    except KeyboardInterrupt:
        return 130
    except (NotARun, StoreDenied) as error:
        print_error(error, uri=arguments.uri, verbose=arguments.verbose)
        return 2
    except StoreError as error:
        print_error(error, uri=arguments.uri, verbose=arguments.verbose)
        return 1
    return 0


sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    sys.exit(main())
