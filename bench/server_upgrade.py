"""A server is replaced by a newer version while a run trains: what is lost, and what is shown.

The older version is a commit (``--before``), unpacked into a temporary folder and started with this
interpreter on a real S3 server. A run of two local replicas is submitted to it. After its first
rounds this version is started on the same folder, which it must refuse; then the old server ends,
by SIGKILL (its replicas train on) or by SIGTERM (it stops its replicas), this version starts,
migrates the database and adopts the run, which trains to its end and is audited as in
``bench/server_faults.py``. While it runs, the old version is started on the same folder: refused.
At the end, a migration that this version does not know is recorded in the database, as a newer
version would: this version must refuse to start.

Usage: python bench/server_upgrade.py [--before 39f2fb7] [--rounds 40] [--stops kill term]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.server_faults import (  # noqa: E402
    PATIENCE_S,
    REPLICAS,
    problems,
    rounds_of,
    settle,
    submit,
    tracebacks,
)
from bench.support.page_watch import PageWatch  # noqa: E402
from bench.support.server_harness import COOKIE, fetch, running_bucket  # noqa: E402
from dashboard.server import broker  # noqa: E402
from tests.django_process import DjangoProcess  # noqa: E402
from tests.servers import child, free_ports, wait_until  # noqa: E402
from tests.stack import MAKE_USERS, LiveStack, stack_env  # noqa: E402

REFUSED_S = 120
NEWER = (
    "from django.db.migrations.recorder import MigrationRecorder\n"
    "from django.db import connection\n"
    "MigrationRecorder(connection).record_applied('runs', '9999_of_a_newer_version')"
)


@dataclass(frozen=True, kw_only=True)
class Version:
    name: str
    code: Path


def unpack(commit: str, folder: Path) -> Version:
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return Version(name=commit, code=folder)


@contextlib.contextmanager
def serving(
    version: Version, var: Path, env: dict[str, str]
) -> Iterator[tuple[LiveStack, subprocess.Popen[bytes]]]:
    """``manage.py serve`` of a version on an existing or new state folder."""
    (port,) = free_ports(1)
    log = var / f"serve-{version.name}-{port}.log"
    command = [sys.executable, "manage.py", "serve", "--port", str(port)]
    with child(command, log=log, env=env, cwd=version.code) as process:
        wait_until(
            lambda: "serving http" in log.read_text(),
            f"{version.name} did not start",
            timeout_s=600,
            process=process,
            log=log,
        )
        inside = {**env, "REDIS_URL": broker.load(var / "broker").url}
        with contextlib.closing(DjangoProcess(inside, version.code)) as beside:
            yield (
                LiveStack(
                    url=f"http://127.0.0.1:{port}/",
                    var=var,
                    env=inside,
                    pid=process.pid,
                    process=beside,
                ),
                process,
            )


def refused(version: Version, var: Path, env: dict[str, str]) -> str:
    """Return the output of a ``serve`` that must not start."""
    (port,) = free_ports(1)
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", str(port)],
        cwd=version.code,
        env=env,
        capture_output=True,
        text=True,
        timeout=REFUSED_S,
    )
    text = f"status {done.returncode}, {done.stderr.strip()[-300:]}"
    if done.returncode != 1 or "Traceback" in done.stderr:
        raise AssertionError(f"expected a refusal, found {text}")
    return text


def end(process: subprocess.Popen[bytes], var: Path, stop: str) -> None:
    """End the old server, and wait until its children have let go of the folder."""
    process.send_signal(signal.SIGKILL if stop == "kill" else signal.SIGTERM)
    process.wait(60)
    port = broker.load(var / "broker").port
    wait_until(lambda: broker.port_is_free(port), "the old broker has not ended", timeout_s=60)


def trial(old: Version, new: Version, folder: Path, *, stop: str, rounds: int) -> list[str]:
    var = folder / "var"
    var.mkdir(parents=True)
    with running_bucket(folder) as (_, extra):
        env = {**stack_env(var), **extra}
        with serving(old, var, env) as (before, process):
            before.python(MAKE_USERS)
            run = submit(before, f"upgraded, {stop}", rounds)
            wait_until(lambda: rounds_of(before, run) >= 3, "no rounds", timeout_s=240)
            print(f"## upgrade, old server ended by {stop}")
            print(f"  new beside old: {refused(new, var, env)}")
            at = rounds_of(before, run)
            end(process, var, stop)
            stopped, logged = time.monotonic(), tracebacks(var)
        with serving(new, var, env) as (after, process):
            print(
                f"  rounds when the old server ended: {at}, until pages answered: "
                f"{time.monotonic() - stopped:.1f} s"
            )
            cookie = f"sessionid={after.python(COOKIE)}"
            watch = PageWatch(lambda path: fetch(after.url, path, cookie), run)
            back_s = watch.until_normal(patience_s=PATIENCE_S)
            print(f"  back: {'never' if back_s is None else f'{back_s:.1f} s'}")
            print(f"  old beside new: {refused(old, var, env)}")
            launches = REPLICAS * (1 if stop == "kill" else 2)
            seen = settle(after, run, lambda seen: problems(seen, rounds, launches))
            wrong = problems(seen, rounds, launches)
            for at_s, one in watch.seen:
                print(f"  {at_s:6.1f} s {one.text[:500]}")
            for kind, message in seen["warnings"]:
                print(f"  event {kind}: {message[:200]}")
            print(f"  alerts: {', '.join(seen['alerts']) or 'none'}")
            more = {k: n - logged.get(k, 0) for k, n in tracebacks(var).items()}
            print(f"  tracebacks: { {k: n for k, n in more.items() if n} or 'none' }")
            after.python(NEWER)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        print(f"  after a newer version: {refused(new, var, env)}")
    print(f"  {'; '.join(wrong) or 'nothing lost'}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default="39f2fb7", help="commit of the older version")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stops", nargs="+", choices=("kill", "term"), default=["kill", "term"])
    given = parser.parse_args()
    os.environ["ARCHIPELAGO_OPERATORS_LOCAL"] = "code"
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old, new = unpack(given.before, folder / "old"), Version(name="this", code=ROOT)
        for stop in given.stops:
            found = trial(old, new, folder / stop, stop=stop, rounds=given.rounds)
            failed += bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
