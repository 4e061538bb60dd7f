"""``python -m diloco.inspect URI``: a run as its bucket shows it, without torch or a dashboard.

    python -m diloco.inspect s3://bucket/run --last 50
    python -m diloco.inspect s3://bucket/run --rounds 100-120 --json
    python -m diloco.inspect s3://bucket/run --watch

Who is alive cannot be read off anybody's clock (invariant I5), so the leases are looked at twice, a
beat apart; ``--once`` looks once and leaves it open. Nothing is written. Status 2: no run that this
version can read lies there, or a bad option; 1: the store failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diloco.clock import Clock, SystemClock
from diloco.inspection.findings import findings
from diloco.inspection.leases import LeaseWatch
from diloco.inspection.picture import Picture
from diloco.inspection.reading import NotARun, Scope, read_document, read_picture
from diloco.inspection.rendering import render
from diloco.protocol.group_document import PROTOCOL
from diloco.store.base import Store, StoreDenied, StoreError
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore
from diloco.versions import add_version

THREADS = 16
PATIENCE_S = 20.0
"""How long a request is tried again."""


def rounds(text: str) -> tuple[int, int | None]:
    """``A-B``, ``A-`` or ``A``."""
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
    add_version(parser)
    add = parser.add_argument
    add("uri", help="rendezvous URI of the run, or its folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=count, default=20, help="newest rounds to show (20)")
    which.add_argument("--rounds", type=rounds, help="rounds to show: A-B, A- or A")
    add("--settings", action="store_true", help="show all settings, not only the changed ones")
    add("--sizes", action="store_true", help="weigh the whole bucket; lists all of it")
    look = parser.add_mutually_exclusive_group()
    look.add_argument("--once", action="store_true", help="look at the leases only once")
    look.add_argument("--watch", action="store_true", help="show it again and again, until Ctrl-C")
    add("--json", action="store_true", help="print one JSON document")
    return parser


def inspect(
    store: Store, *, scope: Scope | None = None, once: bool = False, clock: Clock | None = None
) -> Picture:
    """Read a run. Looks at the leases twice, unless ``once`` or nobody claims to be alive.

    Raises :class:`~diloco.inspection.reading.NotARun` and what the store raises.
    """
    clock = clock or SystemClock()
    document = read_document(store)
    with ThreadPoolExecutor(THREADS) as pool:
        timeout_s = document.settings.heartbeat_timeout_s
        watch = LeaseWatch(store, pool, clock=clock, timeout_s=timeout_s)
        leases = watch.look()
        pause_s = 0.0 if once else watch.pause_s(leases)
        if pause_s:
            clock.sleep(pause_s)
            leases = watch.look()
        picture = read_picture(store, document, pool, scope=scope or Scope(), leases=leases)
    return _with_watch(picture, watch)


def _with_watch(picture: Picture, watch: LeaseWatch) -> Picture:
    return dataclasses.replace(
        picture,
        incarnations=watch.incarnations,
        unreadable=(*watch.unreadable, *picture.unreadable),
    )


def document(picture: Picture) -> dict[str, Any]:
    """What ``--json`` prints. A number that is not finite is null."""
    body = dataclasses.asdict(picture)
    body["document"] = json.loads(picture.document.to_bytes())
    for shown, line in zip(picture.rounds, body["rounds"], strict=True):
        line["state"] = shown.state
        line["marks"] = {str(r): picture.mark(r, shown) for r in picture.replicas}
    body["findings"] = [dataclasses.asdict(finding) for finding in findings(picture)]
    cleaned = _finite(body)
    assert isinstance(cleaned, dict)
    return {"format": "archipelago.inspection", "protocol": PROTOCOL, **cleaned}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _watch(store: Store, arguments: argparse.Namespace, scope: Scope, clock: Clock) -> None:
    """Show it again and again; the leases are remembered from one time to the next."""
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
        store = RetryingStore(
            open_store(arguments.uri), clock=clock, rng=random.Random(0), deadline_s=PATIENCE_S
        )
        if arguments.watch:
            _watch(store, arguments, scope, clock)
        else:
            print(_text(inspect(store, scope=scope, once=arguments.once, clock=clock), arguments),
                  end="")  # fmt: skip
    except KeyboardInterrupt:
        return 130
    except (NotARun, StoreDenied) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StoreError as error:
        print(f"error: the store failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
