"""The work of an exchange, shared by the ranks of one replica.

The leader's exchange runs in a background thread, and so does each follower's part, as *jobs*
(:mod:`diloco.ranks.jobs`) on its slice.

A round is divided if it is a gathered one that merges by mean: then each rank reads and sums only
its slice of the payloads. In any other round the leader reduces the whole fragment and sends each
rank its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from diloco.clock import Clock
from diloco.exchange.cosine import cosine_of
from diloco.exchange.payload import PayloadInfo
from diloco.exchange.payload_reader import Own
from diloco.exchange.reduce import Merged, Reduction
from diloco.exchange.team import OneProcess, UploadedPart
from diloco.exchange.timings import Timings
from diloco.model.fragments import Slot
from diloco.model.outer_optimizer import ContentDigest, chunk_digests, vector_bytes
from diloco.protocol import keys
from diloco.protocol.reading import read_record
from diloco.protocol.records import Commit, Identity, Plan
from diloco.protocol.round_view import GATHER
from diloco.protocol.settings import GroupSettings
from diloco.ranks.command_channel import CommandChannel
from diloco.ranks.jobs import Job, JobLeader
from diloco.ranks.rank_progress import EMPTY, RankProgress
from diloco.store.base import MissingKey, Store
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
        self._bodies: dict[int, Tensor | None] = {}

    @property
    def store(self) -> Store:
        """The store, opened at first use."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def merged(self, round: int) -> Tensor:
        """Return this rank's slice of the merged mean of a round."""
        return self._progress.merged[round]

    def do(self, job: Job) -> Any:
        """Execute a job; return its result as JSON values, None if this rank has no part of it."""
        if job["do"] == "divide":
            round, fragment = job["round"], job["fragment"]
            self._progress.merged[round] = self.layout.scatter(self.vector, fragment, self._channel)
            return None
        fragment = job["fragment"]
        if not self.layout.slice_of(fragment).numel:
            return None
        if job["do"] == "upload":
            return self._upload(PayloadInfo(**job["info"]))
        plan = Plan.from_bytes(job["plan"].encode())
        reduction = self._reduction(plan, Identity(**job["own"]), job["digest"])
        if job["do"] == "cosine":
            with self.timings.measure("reduce"):
                return reduction.products(self._progress.merged[plan.round])
        assert job["do"] == "reduce", job["do"]
        merged = reduction.gather_span()
        self._progress.merged[plan.round] = merged
        return chunk_digests(vector_bytes(merged)).hex()

    def _upload(self, info: PayloadInfo) -> dict[str, Any]:
        part = OneProcess(self.store, self.settings, self.clock).upload_slice(
            info,
            self._progress.contributed(info.round),
            self.layout.table.slots_of(info.fragment),
            slice=self._channel.rank,
            span=self.layout.slice_of(info.fragment),
        )
        self._bodies = {info.round: part.body}
        return {
            "size_bytes": part.size_bytes,
            "checksums": part.checksums,
            "squares": part.squares,
            "encode_s": part.encode_s,
            "damage": part.verify(),
        }

    def _reduction(self, plan: Plan, identity: Identity, digest: str) -> Reduction:
        """Return the reduction of this rank's slice. ``digest`` is that of this process's own
        payload, '' if it has none."""
        span = self.layout.slice_of(plan.fragment)
        opened = self._progress.opened.get(plan.round)
        own = None
        if digest and opened is not None:
            own = Own(
                identity=identity,
                digest=digest,
                vector=opened.contributed,
                body=self._bodies.get(plan.round),
                start=span.start,
            )
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
        self,
        plan: Plan,
        slots: Sequence[Slot],
        *,
        timings: Timings,
        commit_of: Callable[[int], Commit | None],
        own: Own | None,
    ) -> Reduction:
        if not self.work.layout.is_divided(plan.fragment):
            return self._alone().reduction(
                plan, slots, timings=timings, commit_of=commit_of, own=own
            )
        return RankReduction(
            self,
            self.work.store,
            self.work.settings,
            plan,
            slots,
            timings=timings,
            commit_of=commit_of,
            own=own,
        )

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

    ``own`` of the leader has the elements of its slice only. A reduction of the whole fragment
    therefore reads the replica's own payload too.
    """

    def __init__(
        self,
        team: RankTeam,
        store: Store,
        settings: GroupSettings,
        plan: Plan,
        slots: Sequence[Slot],
        *,
        timings: Timings,
        commit_of: Callable[[int], Commit | None],
        own: Own | None,
    ) -> None:
        super().__init__(store, settings, plan, slots, timings=timings, commit_of=commit_of)
        self._team = team
        self._is_divided = plan.mode == GATHER and settings.merge == "mean"
        self._job: Job = {
            "fragment": plan.fragment,
            "plan": plan.to_bytes().decode(),
            "own": asdict(team.identity),
            "digest": own.digest if own else "",
        }

    def gather(self) -> Merged:
        if not self._is_divided:
            return self._divide(super().gather())
        content = ContentDigest()
        for digests in self._team.run("reduce", timings=self._timings, **self._job):
            content.update_chunks(bytes.fromhex(digests or ""))
        return self._held(content.hexdigest())

    def committed(self, commit: Commit) -> Merged:
        merged = super().committed(commit)
        return merged if self._plan.mode == GATHER else self._divide(merged)

    def cosine(self, merged: Merged) -> float | None:
        results = self._team.run("cosine", timings=self._timings, **self._job)
        return cosine_of([(x, y, z) for x, y, z in filter(None, results)])

    def _divide(self, merged: Merged) -> Merged:
        """Send each rank its slice of the merged fragment, whose memory is then freed."""
        plan = self._plan
        self._team.run("divide", round=plan.round, fragment=plan.fragment, vector=merged.vector)
        self._vector = None
        return self._held(merged.digest)

    def _held(self, digest: str) -> Merged:
        vector = self._team.work.merged(self._plan.round)
        return Merged(vector=vector, digest=digest, present=self._present)


def _uploaded(*, damage: str, **result: Any) -> UploadedPart:
    """Return the object that a rank has uploaded and verified."""
    return UploadedPart(verify=lambda: damage, **result)
