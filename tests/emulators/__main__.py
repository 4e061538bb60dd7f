"""``python -m tests.emulators NAME``: serve one emulated backend until SIGTERM.

    python -m tests.emulators modal --port 8471 --state var/emulators

Once it accepts connections it prints one line of JSON: its address, and the credentials and options
for an executor. ``POST /_emulator/<fault>`` injects a fault. :mod:`tests.emulators.compose` serves
all backends at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials and options that direct an executor to a server."""

    credentials: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)


def _modal(server: Any) -> Access:
    token_id, token_secret = server.token
    return Access(
        credentials={
            "MODAL_SERVER_URL": server.url,
            "MODAL_TOKEN_ID": token_id,
            "MODAL_TOKEN_SECRET": token_secret,
        }
    )


def _huggingface(server: Any) -> Access:
    (token, *_) = server.tokens
    return Access(credentials={"HF_TOKEN": token}, options={"endpoint": server.url})


def _sagemaker(server: Any) -> Access:
    from tests.emulators.sagemaker import ACCOUNT, ROLE

    options = {
        "role_arn": ROLE,
        "image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/archipelago-replica:1",
        "output_path": "s3://archipelago/output",
    }
    return Access(credentials=server.client_env, options=options)


def _kubernetes(server: Any) -> Access:
    kubeconfig = {"KUBECONFIG": json.dumps(server.kubeconfig())}
    return Access(credentials=kubeconfig, options={"image": "archipelago-replica:1"})


_SERVERS: dict[str, tuple[str, Callable[[Any], Access]]] = {
    "modal": ("ModalServer", _modal),
    "huggingface": ("HuggingFaceHub", _huggingface),
    "sagemaker": ("SageMakerServer", _sagemaker),
    "kubernetes": ("KubernetesCluster", _kubernetes),
}
BACKENDS = tuple(_SERVERS)


def serve(name: str, state: Path, port: int) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP. Jobs end with the server."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.set())
    server_class, access = _SERVERS[name]
    state.mkdir(parents=True, exist_ok=True)
    server = getattr(importlib.import_module(f"tests.emulators.{name}"), server_class)(
        state, port=port
    )
    try:
        server.__enter__()
    except OSError as error:
        print(f"error: port {port}: {error.strerror}", file=sys.stderr)
        return 1
    try:
        configuration = access(server)
        ready = {"backend": name, "url": server.url}
        ready |= {"credentials": configuration.credentials, "options": configuration.options}
        print(json.dumps(ready), flush=True)
        stopping.wait()
    finally:
        server.__exit__(None, None, None)
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulators", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("name", choices=BACKENDS)
    parser.add_argument("--port", type=int, default=0, help="0, the default, selects a free port")
    parser.add_argument("--state", type=Path, default=Path("var/emulators"), metavar="DIR")
    given = parser.parse_args(argv)
    return serve(given.name, given.state / given.name, given.port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
