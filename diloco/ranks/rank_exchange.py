"""The work of an exchange, shared by the ranks of one replica.

The leader's exchange runs in a background thread, and so does each follower's part, as *jobs*
(:mod:`diloco.ranks.jobs`): it encodes and uploads its slice, and does its part of the reduction
(:mod:`diloco.ranks.rank_round`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Unpack

from torch import Tensor

from diloco.clock import Clock
from diloco.errors import ReplicaError
from diloco.exchange.cosine import cosine_of
from diloco.exchange.mean_reader import Chunks
from diloco.exchange.payload import PayloadInfo
from diloco.exchange.payload_reader import Own
from diloco.exchange.reduce import CannotReduce, Listed, Merged, Reduction
from diloco.exchange.team import OneProcess, ReductionOptions, UploadedPart
from diloco.exchange.timings import Timings
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import ContentDigest
from diloco.protocol import keys
from diloco.protocol.blocks import Span
from diloco.protocol.reading import read_record
from diloco.protocol.records import Commit, Identity, Plan
from diloco.protocol.settings import GroupSettings
from diloco.ranks.command_channel import CommandChannel
from diloco.ranks.jobs import Job, JobLeader
from diloco.ranks.rank_progress import EMPTY, RankProgress
from diloco.ranks.rank_round import Place, RankRound
from diloco.store.base import MissingKey, Store, StoreError
from diloco.store.metered import MeteredStore


class RankWork:
    """One rank's part of the jobs. ``vector`` is the leader's whole merged fragment in a job that
    divides it."""

    def __init__(
        self,
        progress: RankProgress,
        open_store: Callable[[], Store],
        settings: GroupSettings,
        channel: CommandChannel,
        clock: Clock,
    ) -> None:
        self.vector: Tensor = EMPTY
        self.timings = Timings(clock)
        self.layout = progress.layout
        self.settings = settings
        self.clock = clock
        self._progress = progress
        self._open_store = open_store
        self._channel = channel
        self._store: Store | None = None

    @property
    def store(self) -> Store:
        """The store, opened at first use."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def merged(self, round: int) -> Tensor:
        """Return this rank's slice of the merged mean of a round."""
        return self._progress.reductions[round].merged

    def do(self, job: Job) -> Any:
        """Execute a job; return its result as JSON values, None if this rank has no part of it."""
        fragment = job["fragment"]
        if job["do"] == "upload":
            has_elements = self.layout.slice_of(fragment).numel
            return self._upload(PayloadInfo(**job["info"])) if has_elements else None
        part = self._part(job)
        match job["do"]:
            case "gather":
                return part.gather()
            case "sum":
                return part.sum_share(job["shard"])
            case "join":
                return part.join_shares(job["shard"], writer=job["writer"])
            case "finish":
                return part.finish_storing()
            case "read":
                read = part.read_mean(_by_shard(job["digests"]), early=job["early"])
                return {
                    shard: [chunks.first, chunks.digests.hex()] for shard, chunks in read.items()
                }
            case "expect":
                return part.expect(_by_shard(job["digests"]))
            case "close":
                return part.close()
            case "divide":
                part.merged.copy_(self.layout.scatter(self.vector, fragment, self._channel))
                return None
            case "norms":
                return part.restore_norms()
            case "cosine":
                return part.products()
        raise AssertionError(job["do"])

    def _part(self, job: Job) -> RankRound:
        """Return this rank's part of the reduction of the plan of a job."""
        rounds = self._progress.reductions
        plan = Plan.from_bytes(job["plan"].encode())
        known = rounds.get(plan.round)
        if known is None or known.plan != plan or known.timings is not self.timings:
            known = rounds[plan.round] = self._new_part(plan, Identity(**job["own"]), job["digest"])
        return known

    def _new_part(self, plan: Plan, identity: Identity, digest: str) -> RankRound:
        """``digest`` is that of this process's own payload, '' if it has none."""
        place = Place(channel=self._channel, slices=self.layout.slices_of(plan.fragment))
        opened = self._progress.opened.get(plan.round)
        own = None
        if digest and opened is not None:
            own = Own(
                identity=identity,
                digest=digest,
                vector=opened.contributed,
                body=self._progress.bodies.get(plan.round),
                start=place.slice.start,
            )

        def reduction(span: Span, own: Own | None) -> Reduction:
            return Reduction(
                self.store,
                self.settings,
                plan,
                self.layout.table.slots_of(plan.fragment),
                timings=self.timings,
                commit_of=self._commit_of,
                own=own,
                span=span,
            )

        return RankRound(
            plan, place, lambda: self.store, reduction=reduction, own=own, timings=self.timings
        )

    def _upload(self, info: PayloadInfo) -> dict[str, Any]:
        part = OneProcess(self.store, self.settings, self.clock).upload_slice(
            info,
            self._progress.contributed(info.round),
            self.layout.table.slots_of(info.fragment),
            slice=self._channel.rank,
            span=self.layout.slice_of(info.fragment),
        )
        self._progress.bodies[info.round] = part.body
        return {
            "size_bytes": part.size_bytes,
            "checksums": part.checksums,
            "squares": part.squares,
            "encode_s": part.encode_s,
            "damage": part.verify(),
        }

    def _commit_of(self, round: int) -> Commit | None:
        try:
            return read_record(
                self.store, keys.commit(round), Commit, is_right=lambda c: c.round == round
            )
        except MissingKey:
            return None


class RankTeam(JobLeader):
    """The leader's side of the exchange."""

    def __init__(
        self, work: RankWork, channel: CommandChannel, metered: MeteredStore, identity: Identity
    ) -> None:
        super().__init__(work, channel, metered)
        self.identity = identity
        self.work = work

    def upload(
        self, info: PayloadInfo, vector: Tensor, slots: Sequence[Slot]
    ) -> list[UploadedPart]:
        if not self.work.layout.is_divided(info.fragment):
            return self._alone().upload(info, vector, slots)
        results = self.run("upload", fragment=info.fragment, info=asdict(info))
        return [_uploaded(**result) for result in results if result is not None]

    def reduction(
        self, plan: Plan, slots: Sequence[Slot], **options: Unpack[ReductionOptions]
    ) -> Reduction:
        if not self.work.layout.is_divided(plan.fragment):
            return self._alone().reduction(plan, slots, **options)
        return RankReduction(self, plan, slots, **options)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._channel.size

    def _alone(self) -> OneProcess:
        return OneProcess(self.work.store, self.work.settings, self.work.clock)

    def run(
        self, do: str, *, timings: Timings | None = None, vector: Tensor = EMPTY, **arguments: Any
    ) -> list[Any]:
        """Like :meth:`JobLeader.run`; the leader's part adds its durations to ``timings``, and
        divides ``vector``."""
        with self.lock:
            if timings is not None:
                self.work.timings = timings
            self.work.vector = vector
            try:
                return super().run(do, **arguments)
            finally:
                self.work.vector = EMPTY


class RankReduction(Reduction):
    """The reduction of a fragment that several ranks hold, by the leader.

    Only if a stored mean cannot be read, the leader reduces the whole fragment and sends each rank
    its slice. ``own`` has the elements of the leader's slice only, so the replica's own payload is
    read too then.
    """

    def __init__(
        self,
        team: RankTeam,
        plan: Plan,
        slots: Sequence[Slot],
        **options: Unpack[ReductionOptions],
    ) -> None:
        own, options["own"] = options["own"], None
        super().__init__(team.work.store, team.work.settings, plan, slots, **options)
        self._team = team
        self._job: Job = {
            "fragment": plan.fragment,
            "plan": plan.to_bytes().decode(),
            "own": asdict(team.identity),
            "digest": own.digest if own else "",
        }
        self._expects = False

    def _run(self, do: str, **arguments: Any) -> list[Any]:
        return self._team.run(do, timings=self._timings, **self._job, **arguments)

    def gather(self) -> Merged:
        content = ContentDigest()
        for digests in self._run("gather"):
            content.update_chunks(bytes.fromhex(digests))
        self._restore_norms()
        return self._result(content.hexdigest())

    def store_shards(
        self, shards: Sequence[int], *, listed: Callable[[], Listed] = dict
    ) -> dict[int, str]:
        digests: dict[int, str] = {}
        try:
            for index, shard in enumerate(shards):
                self._run("sum", shard=shard)
                writer = index % self._team.size
                joined = self._run("join", shard=shard, writer=writer)
                digests[shard] = self._reduced_shards[shard] = joined[writer]
        except (CannotReduce, StoreError):
            with suppress(StoreError):  # no upload outlives its round
                self._run("finish")
            raise
        if len(shards) > 1:
            self._read_early(self._listed_once(listed()))
        self._run("finish")
        if len(shards) > 1:
            self.read_ahead(listed())
        return digests

    def expect(self, digests: Mapping[int, str]) -> None:
        self._expects = True
        self._run("expect", digests=digests)

    def close(self) -> None:
        if self._expects:
            with suppress(ReplicaError):
                self._run("close")

    def cosine(self, merged: Merged) -> float | None:
        return cosine_of([(x, y, z) for x, y, z in filter(None, self._run("cosine"))])

    def _read_mean(self, digests: Mapping[int, str], *, early: bool) -> list[dict[int, Chunks]]:
        return [
            {
                int(shard): Chunks(first, bytes.fromhex(found))
                for shard, (first, found) in read.items()
            }
            for read in self._run("read", digests=digests, early=early)
        ]

    def _reduce_here(self, commit: Commit) -> None:
        super()._reduce_here(commit)
        self._run("divide", vector=self.merged)
        self._vector = None  # frees its memory

    def _restore_norms(self) -> None:
        if not self._is_mean:
            self._run("norms")

    def _result(self, digest: str = "") -> Merged:
        vector = self._team.work.merged(self._plan.round)
        return Merged(vector=vector, digest=digest, present=self._present)


def _by_shard(digests: Mapping[str, str]) -> dict[int, str]:
    """Return the digests of a job by shard: the keys of a JSON object are texts."""
    return {int(shard): digest for shard, digest in digests.items()}


def _uploaded(*, damage: str, **result: Any) -> UploadedPart:
    """Return the object that a rank has uploaded and verified."""
    return UploadedPart(verify=lambda: damage, **result)
