"""Drafts: what a person asks for before it is a run, and the ones offered ready-made.

A draft holds no ids and touches nothing; :func:`runs.services.create_run` checks the whole and
stores it.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.workload import ByteGPTWorkload


@dataclass(frozen=True, kw_only=True)
class PoolDraft:
    """``count`` replicas on one backend and hardware."""

    backend: str = "local"
    hardware: str = "cpu"
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class RunDraft:
    """``rendezvous`` is the URI of the run's own prefix; '' means the default prefix + run id.
    ``time_limit_s`` 0 means no limit."""

    name: str
    settings: GroupSettings
    workload: ByteGPTWorkload
    pools: tuple[PoolDraft, ...]
    rendezvous: str = ""
    time_limit_s: int = 0


def local_demo() -> RunDraft:
    """Four CPU replicas on this machine that learn the standard library's source in minutes."""
    return RunDraft(
        name="Local demo",
        settings=GroupSettings(
            num_replicas=4,
            min_quorum=1,
            max_replicas=8,
            sync_every=90,
            total_rounds=16,
            warmup_steps=144,
            inner_lr=3e-3,
            min_lr_ratio=0.05,
            batch_size=4,
            eval_every=1,
            checkpoint_every=5,
            grace_s=30.0,
            heartbeat_timeout_s=15.0,
            round_timeout_s=300.0,
        ),
        workload=ByteGPTWorkload(size="demo", eval_bytes=32_768),
        pools=(PoolDraft(backend="local", hardware="cpu", count=4),),
        time_limit_s=1800,
    )
