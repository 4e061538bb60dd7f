"""A run with a bucket, a backend and a clock, all under the test's control.

:class:`Bucket` writes what replicas would write, with the records of the protocol;
:class:`FakeExecutor` is a backend whose jobs end when the test ends them; :class:`Clock`
replaces ``timezone.now``. Nothing here sleeps or starts a process.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diloco.protocol import keys
from diloco.protocol.records import (
    CheckpointManifest,
    Commit,
    ContributionRecord,
    FinalManifest,
    Heartbeat,
    Identity,
    Plan,
    PlannedContribution,
    Refusal,
    StoredObject,
)
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Evaluation, LogLine, RoundReport, Segment, StepColumns
from diloco.protocol.workload import ByteGPTWorkload
from diloco.store.base import Store
from executors.base import (
    Capabilities,
    Cause,
    CodeRef,
    JobState,
    LaunchRefused,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
    RetryLater,
)
from executors.base import LogLine as JobLine
from runs.submit.run_draft import PoolDraft, RunDraft

DIGEST = "d" * 64
_DRAFT_FIELDS = frozenset(RunDraft.__dataclass_fields__) - {"settings"}


def person(name: str, role: str = "", *, superuser: bool = False) -> Any:
    """A user with one of the roles; signs in by force, so there is no password to hash."""
    from django.contrib.auth.models import Group, User

    user, _ = User.objects.get_or_create(
        username=name, defaults={"is_staff": role == "admin", "is_superuser": superuser}
    )
    user.groups.set([Group.objects.get_or_create(name=role)[0]] if role else [])
    return user


def draft(*, replicas: int = 2, rendezvous: str = "", **changes: Any) -> RunDraft:
    """``changes`` are group settings, or fields of the draft."""
    own = {k: changes.pop(k) for k in _DRAFT_FIELDS if k in changes}
    settings = {
        "num_replicas": replicas,
        "max_replicas": 32,
        "min_quorum": 1,
        "sync_every": 10,
        "total_rounds": 4,
        "warmup_steps": 5,
        "heartbeat_timeout_s": 15.0,
    }
    return RunDraft(
        **{
            "name": "Test run",
            "settings": GroupSettings(**(settings | changes)),
            "workload": ByteGPTWorkload(),
            "pools": (PoolDraft(count=replicas),),
            "rendezvous": rendezvous,
            **own,
        }
    )


class Clock:
    """A replacement of ``timezone.now``. With ``moves_s`` it advances at each reading, as a real
    clock does within a tick."""

    def __init__(self) -> None:
        self.at = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)
        self.moves_s = 0.0

    def __call__(self) -> datetime.datetime:
        self.pass_s(self.moves_s)
        return self.at

    def pass_s(self, seconds: float) -> None:
        self.at += datetime.timedelta(seconds=seconds)


def tick(run_id: str, outbox: list[tuple[Any, ...]] | None = None) -> None:
    """Run one tick of all workers for a run: ingest, control and enqueued bucket writes.

    If control waits for the last records of an ended job, ingest and control run once more. Without
    an ``outbox``, bucket writes always run.
    """
    from runs.ingest.ingest_pass import ingest_run
    from runs.models import IngestState
    from runs.reconcile.bucket_writes import write_run
    from runs.reconcile.reconciler import reconcile_run

    ingest_run(run_id)
    reconcile_run(run_id)
    state = IngestState.objects.filter(run=run_id).first()
    if state is not None and state.complete_pass < state.wanted_pass:
        ingest_run(run_id)
        reconcile_run(run_id)
    writes = ("write_bucket", run_id)
    if outbox is None or writes in outbox:
        write_run(run_id)
    if outbox is not None:
        outbox[:] = [sent for sent in outbox if sent != writes]


class FakeExecutor:
    """An executor without processes: a status by launch key, which a test can change."""

    backend = "local"

    def __init__(self) -> None:
        self.capabilities = Capabilities(remote=False)
        self.jobs: dict[str, ReplicaStatus] = {}
        self.env: dict[str, Mapping[str, str]] = {}
        self.args: dict[str, Any] = {}
        self.specs: dict[str, ReplicaSpec] = {}
        self.code: dict[str, CodeRef | None] = {}
        self.cancelled: list[str] = []
        self.launches = 0
        """Number of started jobs; ``ensured`` counts all requested ones, with repetitions."""
        self.ensured = 0
        self.away = ""
        self.refuses: str | Exception = ""

    def ensure(
        self,
        specs: Sequence[ReplicaSpec],
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        code: CodeRef | None = None,
    ) -> list[ReplicaHandle]:
        self._answer()
        if self.refuses:
            raise (
                self.refuses if isinstance(self.refuses, Exception) else LaunchRefused(self.refuses)
            )
        for spec in specs:
            self.ensured += 1
            if spec.launch_key in self.jobs:
                continue
            self.launches += 1
            self.jobs[spec.launch_key] = ReplicaStatus(state=JobState.RUNNING)
            self.env[spec.launch_key] = dict(env or {})
            self.specs[spec.launch_key] = spec
            self.code[spec.launch_key] = code
            self.args[spec.launch_key] = (entrypoint, dict(entrypoint_args or {}))
        return [self._handle(spec.launch_key) for spec in specs]

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        self._answer()
        return [self.jobs[h.launch_key] for h in handles]

    def find(self, launch_key: str) -> ReplicaHandle | None:
        self._answer()
        return self._handle(launch_key) if launch_key in self.jobs else None

    def live(self) -> list[ReplicaHandle]:
        self._answer()
        return [self._handle(k) for k, s in self.jobs.items() if s.state != JobState.ENDED]

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[JobLine]:
        return iter(())

    def check(self) -> str:
        self._answer()
        return "a test's own backend"

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        return []

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        self._answer()
        self.cancelled += [h.launch_key for h in handles]

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        return self.poll(handles)

    def end(
        self, launch_key: str, cause: Cause, *, code: int | None = None, message: str = ""
    ) -> None:
        self.jobs[launch_key] = ReplicaStatus(
            state=JobState.ENDED, cause=cause, exit_code=code, message=message
        )

    def _handle(self, launch_key: str) -> ReplicaHandle:
        return ReplicaHandle(backend="local", launch_key=launch_key, data={"pid": 1})

    def _answer(self) -> None:
        if self.away:
            raise RetryLater(self.away)


def incarnation(replica: int, seq: int = 1) -> str:
    return keys.incarnation(seq, f"{replica:08x}")


def identity(replica: int, seq: int = 1) -> Identity:
    return Identity(replica=replica, incarnation=incarnation(replica, seq))


class Bucket:
    """Writes the records of replicas. ``wall_s`` is the wall clock of the writers."""

    def __init__(self, store: Store, wall_s: float = 1_893_500_000.0) -> None:
        self.store = store
        self.wall_s = wall_s

    def beat(self, replica: int, count: int, state: str = "computing", **more: Any) -> None:
        seq = more.pop("seq", 1)
        values = {
            "replica": replica,
            "incarnation": incarnation(replica, seq),
            "count": count,
            "interval_s": 2.0,
            "state": state,
            "round": 1,
            "step": 0,
            "tokens": 0,
            "started_wall_s": self.wall_s,
            "wall_s": self.wall_s,
            "host": "islet",
            "pid": 7,
            "device": "cpu",
        }
        beat = Heartbeat(**(values | more))
        self.store.put(keys.beat(replica, incarnation(replica, seq)), beat.to_bytes())

    def segment(self, replica: int, n: int, **more: Any) -> bytes:
        """Write segment ``n`` with the ``losses`` of steps from ``first`` on; return its bytes."""
        seq = more.pop("seq", 1)
        losses, first = more.pop("losses", ()), more.pop("first", 1)
        steps = range(first, first + len(losses))
        columns = StepColumns(
            step=tuple(steps),
            round=tuple((s - 1) // 10 + 1 for s in steps),
            wall_s=tuple(self.wall_s + s for s in steps),
            tokens=tuple(1000 * s for s in steps),
            loss=tuple(losses),
            lr=tuple(1e-3 for _ in steps),
        )
        segment = Segment(
            **{
                "replica": replica,
                "incarnation": incarnation(replica, seq),
                "n": n,
                "wall_s": self.wall_s,
                "state": "computing",
                "round": 1,
                "steps": columns,
                **more,
            }
        )
        data = segment.to_bytes()
        self.store.put(keys.telemetry(replica, incarnation(replica, seq), n), data)
        return data

    def report(self, round: int, **more: Any) -> RoundReport:
        values = {
            "round": round,
            "outcome": "included",
            "started_wall_s": self.wall_s,
            "committed_wall_s": self.wall_s + 8,
            "phases": {"compute": 6.0, "wait": 2.0},
            "bytes_up": 100,
            "bytes_down": 300,
            "requests": 9,
            "norm": 1.5,
            "update_norm": 0.5,
            "contributors": 2,
            "weights_digest": DIGEST,
        }
        return RoundReport(**(values | more))

    def evaluation(self, round: int, loss: float) -> Evaluation:
        return Evaluation(round=round, loss=loss, tokens=0, wall_s=self.wall_s + round)

    def log(self, message: str) -> LogLine:
        return LogLine(wall_s=self.wall_s, level="info", message=message)

    def contribution(self, round: int, replica: int, **more: Any) -> None:
        seq = more.pop("seq", 1)
        values = {
            "round": round,
            "fragment": 0,
            "base_round": round - 1,
            "base_digest": DIGEST,
            "replica": replica,
            "incarnation": incarnation(replica, seq),
            "model_hash": "m",
            "codec": "fp32",
            "numel": 10,
            "tokens": 1000,
            "new_tokens": 1000,
            "steps": 10,
            "rounds": 1,
            "loss": 3.0,
            "norm": 1.25,
            "size_bytes": 40,
            "digest": DIGEST,
            "compute_s": 6.0,
            "encode_s": 0.1,
            "wall_s": self.wall_s,
        }
        record = ContributionRecord(**(values | more))
        key = keys.contribution_record(round, replica, incarnation(replica, seq))
        self.store.put(key, record.to_bytes())

    def plan(
        self,
        round: int,
        replicas: Sequence[int],
        refused: Mapping[int, str] = {},
        *,
        mode: str = "gather",
    ) -> None:
        plan = Plan(
            round=round,
            fragment=0,
            mode=mode,
            planner=identity(0),
            contributions=tuple(
                PlannedContribution(
                    **vars(identity(r)),
                    weight=1.0,
                    tokens=1000,
                    new_tokens=1000,
                    steps=10,
                    rounds=1,
                    compute_s=6.0,
                    loss=3.0 + r,
                    size_bytes=40,
                    digest=DIGEST,
                )
                for r in replicas
            ),
            refused=tuple(Refusal(**vars(identity(r)), reason=why) for r, why in refused.items()),
            wall_s=self.wall_s,
        )
        self.store.put(keys.plan(round), plan.to_bytes())

    def commit(self, round: int, replicas: Sequence[int], **more: Any) -> None:
        values = {
            "round": round,
            "fragment": 0,
            "committer": identity(0),
            "contributors": tuple(identity(r) for r in replicas),
            "merged_digest": DIGEST,
            "void": "",
            "tokens_total": round * 2000,
            "committed_total": round,
            "wall_s": self.wall_s + 8 * round,
        }
        self.store.put(keys.commit(round), Commit(**(values | more)).to_bytes())

    def checkpoint(self, round: int) -> None:
        key = f"{keys.checkpoint_dir(round, 0, incarnation(0))}weights.safetensors"
        manifest = CheckpointManifest(
            round=round,
            writer=identity(0),
            model_hash="m",
            base_rounds=(round,),
            tensors=(),
            weights_digest=DIGEST,
            weights=StoredObject(key=key, size_bytes=4096, sha256=DIGEST),
            outer=None,
            tokens_total=1,
            wall_s=self.wall_s,
        )
        self.store.put(keys.checkpoint_manifest(round), manifest.to_bytes())

    def final(
        self,
        round: int,
        reason: str = "completed",
        *,
        weights: StoredObject | None = None,
        backed: bool = True,
    ) -> None:
        """Write the final manifest. With ``backed``, also write the missing commits before it."""
        there = {info.key for info in self.store.list(keys.ROUNDS)}
        for number in range(1, round + 1) if backed else ():
            if keys.commit(number) not in there:
                self.commit(number, (0,))
        manifest = FinalManifest(
            round=round,
            reason=reason,
            writer=identity(0),
            weights_digest=DIGEST,
            weights=weights or stored("weights"),
            config=stored("config"),
            summary=stored("summary"),
            wall_s=self.wall_s,
        )
        self.store.put(keys.FINAL_MANIFEST, manifest.to_bytes())


def stored(name: str) -> StoredObject:
    return StoredObject(key=f"final/{name}", size_bytes=4096, sha256=DIGEST)
