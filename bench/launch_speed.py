"""How long it takes to launch many replicas on a backend that takes its time for each.

The executor of this benchmark takes a configured time for each launch; the benchmark measures the
control plane's share: storing launch keys before and handles after, on SQLite, in one worker task.
Sequential launches would take their number times that time.

Usage: python bench/launch_speed.py [--replicas 64] [--launch-s 0.5]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def measure(replicas: int, launch_s: float) -> tuple[float, int]:
    """Seconds of one launch task, and how many replicas have their job afterwards."""
    from django.contrib.auth.models import User

    from diloco.protocol.settings import GroupSettings
    from diloco.protocol.workload import ByteGPTWorkload
    from executors.base import Capabilities, ReplicaHandle, ReplicaSpec
    from runs.models import ReplicaAttempt
    from runs.reconcile import launch
    from runs.submit.create import create_run
    from runs.submit.run_draft import PoolDraft, RunDraft

    class Slow:
        backend = "local"
        capabilities = Capabilities(remote=False)

        def find(self, launch_key: str) -> None:
            return None

        def ensure(
            self, specs: Sequence[ReplicaSpec], *args: Any, **more: Any
        ) -> list[ReplicaHandle]:
            time.sleep(launch_s)
            return [ReplicaHandle(backend="local", launch_key=spec.launch_key) for spec in specs]

    launch.executor_for = lambda pool: Slow()  # type: ignore[assignment,return-value]
    launch.enqueue = lambda *args, **more: None  # type: ignore[assignment]
    owner, _ = User.objects.get_or_create(username="bench", is_superuser=True)
    draft = RunDraft(
        name=f"{replicas} replicas",
        settings=GroupSettings(num_replicas=replicas, max_replicas=replicas),
        workload=ByteGPTWorkload(),
        pools=(PoolDraft(count=replicas),),
    )
    run = create_run(draft, owner=owner, submit_key=uuid.uuid4().hex)
    launch.launch_run(str(run.pk))
    began = time.perf_counter()
    launch.launch_pool(run.pools.get().pk)
    took = time.perf_counter() - began
    return took, ReplicaAttempt.objects.filter(replica__run=run, handle__isnull=False).count()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--launch-s", type=float, default=0.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment: Mapping[str, str] = {
            "ARCHIPELAGO_VAR": folder,
            "DJANGO_SETTINGS_MODULE": "dashboard.settings",
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "ARCHIPELAGO_LOG_LEVEL": "ERROR",
        }
        os.environ.update(environment)
        os.environ.pop("DATABASE_URL", None)
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        print(f"{arguments.launch_s:g} s per launch call")
        print("| replicas | launched | s | in series, at least |")
        print("| ---: | ---: | ---: | ---: |")
        for replicas in arguments.replicas:
            took, launched = measure(replicas, arguments.launch_s)
            series = replicas * arguments.launch_s
            print(f"| {replicas} | {launched} | {took:.1f} | {series:.1f} |")


if __name__ == "__main__":
    main()
