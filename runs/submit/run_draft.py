"""Drafts: a user's request for a run before it exists, and ready-made templates.

A draft contains no ids and has no side effects. :func:`runs.submit.create.create_run` validates and
stores it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from diloco.protocol.evaluation import EvaluationSpec
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload, HuggingFaceWorkload, WorkloadDocument
from executors.registry import DESCRIPTIONS

LIMITS = ("time_limit_s", "start_timeout_s", "budget_usd", "max_restarts")
"""Fields of a draft that are columns of its run."""
POOL_COLUMNS = (
    "backend",
    "hardware",
    "region",
    "spot",
    "image",
    "timeout_s",
    "options",
    "max_price_usd_h",
)
"""Fields of a pool's draft that are columns of the pool."""


@dataclass(frozen=True, kw_only=True)
class PoolDraft:
    """``count`` replicas on one backend and hardware.

    ``hardware`` is a name of :func:`runs.backends.executors.catalogue`. ``timeout_s`` 0 is the
    longest deadline the backend allows. ``credential`` is the id of a
    :class:`~runs.models.Credential` of that backend, None for the server's own environment.
    ``price_usd_h`` overrides the catalogue's price. Hardware above ``max_price_usd_h`` is not
    launched; None means no limit.
    """

    backend: str = "local"
    hardware: str = "cpu"
    count: int = 1
    region: str = ""
    spot: bool = False
    image: str = ""
    timeout_s: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    credential: int | None = None
    price_usd_h: float | None = None
    max_price_usd_h: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlanDraft:
    """Measurement of a run's checkpoints: columns of :class:`~runs.models.EvaluationPlan` as a
    user enters them. ``credential`` is an id of that backend."""

    name: str
    spec: EvaluationSpec = field(default_factory=EvaluationSpec)
    every: int = 1
    backend: str = "local"
    hardware: str = "cpu"
    credential: int | None = None
    timeout_s: int = 3600
    max_attempts: int = 3

    def to_dict(self) -> dict[str, Any]:
        """The plan as in the document of a run, with the credential by id."""
        body = asdict(self)
        del body["spec"]
        return body | spec_values(self.spec)


def spec_values(spec: EvaluationSpec) -> dict[str, Any]:
    """The specification as JSON values."""
    return asdict(spec) | {"tasks": list(spec.tasks)}


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Start with the checkpoint of ``round`` of the run with id ``run``; with ``outer`` also with
    the state of its outer optimizer."""

    run: uuid.UUID
    round: int
    outer: bool = True


@dataclass(frozen=True, kw_only=True)
class RunDraft:
    """A requested run.

    ``rendezvous`` is the URI of the run's own prefix; '' means the default prefix plus run id.
    ``time_limit_s``, ``budget_usd`` and ``start_timeout_s`` 0 mean no limit; ``start_timeout_s`` is
    the longest wait for the first step. ``store_credential`` is the id of a credential of kind
    ``store``, None for the server's own environment. ``archive`` is a zip of user code, for
    workloads that name a function in it. ``fork`` None starts with new weights. ``notify`` are ids
    of the webhooks that receive its alerts; None means all webhooks, also future ones. ``trackers``
    are ids of the experiment trackers that its metrics are mirrored to. ``evaluations`` are
    measured of its checkpoints. Budgets of its ``tags`` apply to its launch.
    """

    name: str
    settings: GroupSettings
    workload: WorkloadDocument
    pools: tuple[PoolDraft, ...]
    rendezvous: str = ""
    time_limit_s: int = 0
    budget_usd: float = 0.0
    start_timeout_s: int = 0
    max_restarts: int = 3
    store_credential: int | None = None
    archive: bytes = field(default=b"", repr=False)
    fork: Fork | None = None
    notify: tuple[int, ...] | None = None
    trackers: tuple[int, ...] = ()
    evaluations: tuple[PlanDraft, ...] = ()
    tags: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The document of the draft, with credentials, webhooks and trackers by id. It has no
        archive: the workload refers to it."""
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        del body["archive"]
        return body | {
            "settings": self.settings.to_dict(),
            "workload": self.workload.to_dict(),
            "pools": [asdict(pool) for pool in self.pools],
            "evaluations": [plan.to_dict() for plan in self.evaluations],
            "tags": list(self.tags),
            "fork": self.fork and asdict(self.fork) | {"run": str(self.fork.run)},
        }


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


def mixed_demo() -> RunDraft:
    """Two replicas on this machine and one on each emulated backend (``tests/emulators/``)."""
    local = local_demo()
    emulated = [backend for backend in DESCRIPTIONS.values() if backend.demo_hardware]
    return replace(
        local,
        name="Mixed demo",
        settings=replace(
            local.settings,
            num_replicas=2 + len(emulated),
            min_quorum=2,
            sync_every=60,
            total_rounds=12,
            warmup_steps=90,
            start_replicas=2 + len(emulated),
        ),
        pools=(
            PoolDraft(backend="local", hardware="cpu", count=2),
            *(PoolDraft(backend=each.name, hardware=each.demo_hardware) for each in emulated),
        ),
        budget_usd=1.0,
        start_timeout_s=300,
    )


def huggingface_start() -> RunDraft:
    """A small Llama from its configuration, on bytes: it needs Transformers and no download."""
    local = local_demo()
    return replace(
        local,
        name="Small Llama",
        settings=replace(local.settings, num_replicas=2, max_replicas=4),
        workload=HuggingFaceWorkload(
            config={
                "model_type": "llama",
                "hidden_size": 96,
                "intermediate_size": 256,
                "num_hidden_layers": 3,
                "num_attention_heads": 3,
                "tie_word_embeddings": True,
            },
            context=128,
            eval_tokens=32_768,
        ),
        pools=(PoolDraft(backend="local", hardware="cpu", count=2),),
    )


@dataclass(frozen=True, kw_only=True)
class Template:
    """A ready-made draft."""

    label: str
    make: Callable[[], RunDraft]


TEMPLATES = {
    "local": Template(label="Local demo: four replicas on this machine", make=local_demo),
    "huggingface": Template(
        label="Small Llama: two replicas, from scratch", make=huggingface_start
    ),
    "mixed": Template(
        label="Mixed demo: two replicas here, one on each emulated backend", make=mixed_demo
    ),
}
"""Templates of the submit form by the name in its address. The first is the default."""
