"""The JSON records of the rendezvous, as frozen dataclasses.

Sizes are bytes, durations seconds; ``*_wall_s`` are wall-clock times for display only (I5).
:mod:`diloco.protocol.record_base` parses and validates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from diloco.protocol import keys
from diloco.protocol.group_document import PROTOCOL
from diloco.protocol.object_digest import digest_of
from diloco.protocol.parsing import abridged
from diloco.protocol.record_base import (
    BOUNDS,
    INT_LIMIT,
    MEBIBYTE,
    OPTIONAL,
    BadRecord,
    Extensible,
    Record,
)

__all__ = [
    "AWAITED_STATE",
    "CALM_STATES",
    "CONTRIBUTED_STATES",
    "ENDED_STATES",
    "MEBIBYTE",
    "REPLICA_STATES",
    "STEPPING_STATES",
    "BadRecord",
    "CheckpointManifest",
    "Command",
    "Commit",
    "ContributionRecord",
    "Extensible",
    "FinalManifest",
    "FinalSample",
    "HandedInRound",
    "Heartbeat",
    "Identity",
    "LateReplica",
    "Plan",
    "PlannedContribution",
    "Record",
    "Refusal",
    "ReplicaStateManifest",
    "StoredObject",
    "TensorEntry",
]


@dataclass(frozen=True, kw_only=True, order=True)
class Identity:
    """A replica number and one of its process starts (incarnations)."""

    replica: int
    incarnation: str

    def __str__(self) -> str:
        return f"replica {self.replica} ({self.incarnation})"


_REPLICA = {BOUNDS: (0, keys.LAST_REPLICA)}
_ROUND = {BOUNDS: (0, keys.LAST_ROUND)}
_COUNT = {BOUNDS: (0, INT_LIMIT - 1)}
_PROCESS_ID = {BOUNDS: (0, 2**31 - 1)}


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Record):
    """The lease: a heartbeat that its only writer overwrites. Observers check whether ``count``
    changes.

    ``role`` is replica, or syncer for a process that only reduces. ``state`` is one of
    :data:`REPLICA_STATES`; ``left`` means that the process ended on purpose. ``round`` is the round
    that the replica works towards, ``step`` its inner step in the run. ``blocked`` is a committed
    round that it cannot read: it needs a checkpoint of that round or a later one. ``uptime_s`` is
    the time since the start of the process on its own monotonic clock.
    """

    LIMIT: ClassVar[int] = 256 * 1024

    replica: int = field(metadata=_REPLICA)
    incarnation: str
    count: int = field(metadata=_COUNT)
    interval_s: float
    role: str = "replica"
    state: str
    round: int = field(metadata=_ROUND)
    step: int = field(metadata=_COUNT)
    tokens: int = field(metadata=_COUNT)
    loss: float | None = None
    started_wall_s: float
    wall_s: float
    host: str = ""
    pid: int = field(default=0, metadata=_PROCESS_ID)
    device: str = ""
    message: str = ""
    blocked: int | None = field(default=None, metadata={OPTIONAL: True, **_ROUND})
    uptime_s: float | None = field(default=None, metadata={OPTIONAL: True})


REPLICA_STATES = (
    "syncing",
    "computing",
    "uploading",
    "waiting",
    "applying",
    "done",
    "failed",
    "left",
)
ENDED_STATES = frozenset({"done", "failed", "left"})
CONTRIBUTED_STATES = frozenset({"waiting", "applying"})
"""States of a replica that has contributed to the round in its lease."""
AWAITED_STATE = "computing"
"""State of a replica for whose contribution a round waits. A calm one then reads whether it is
asked for frequent heartbeats."""
CALM_STATES = frozenset({"computing", "waiting"})
"""States in which a replica can leave out heartbeats."""
STEPPING_STATES = frozenset({"computing", "uploading", "applying"})
"""States of a replica that has reached its first inner step."""


@dataclass(frozen=True, kw_only=True)
class ContributionRecord(Record):
    """Names one payload that is already durable (invariant I2).

    ``base_round`` is the committed round whose global weights the pseudo-gradient is relative to
    (0: checkpoint 0), ``base_digest`` the digest of those weights, both of this fragment. ``norms``
    are the L2 norms of the *decoded* pseudo-gradient per tensor of the fragment, ``norm`` is the
    norm of the whole. ``digest`` covers the payload's header and the checksums of its blocks;
    ``attempt``, which the header has too, counts the contributions of the process
    (:mod:`diloco.exchange.payload`). ``tokens`` and ``steps`` count since the base, ``rounds`` the
    rounds of work among them: 1, and one more for each round of the fragment that was void or did
    not include the replica. ``new_tokens`` are those not counted by an earlier contribution of the
    replica (with fragments, several contributions contain a token). ``rounds_here`` counts the
    rounds that this incarnation has followed since it joined. ``slices`` is the number of objects
    of the payload, one from each rank of the writer that holds a slice of the fragment.
    """

    LIMIT: ClassVar[int] = 4 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 16

    round: int
    fragment: int
    base_round: int
    base_digest: str
    replica: int
    incarnation: str
    model_hash: str
    codec: str
    numel: int
    tokens: int
    new_tokens: int
    steps: int
    rounds: int
    loss: float
    norm: float
    norms: tuple[float, ...] = ()
    size_bytes: int
    digest: str
    compute_s: float
    encode_s: float
    rounds_here: int = 0
    slices: int = 1
    attempt: int = field(default=1, metadata=_COUNT)
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class PlannedContribution:
    """One contribution in a plan: its writer, its weight, and which payload its readers accept.

    ``norms`` are set if the merge needs them (RDA). ``slices`` is the number of objects of the
    payload; ``digest`` and ``attempt`` are those of the record.
    """

    replica: int
    incarnation: str
    weight: float
    tokens: int
    new_tokens: int
    steps: int
    rounds: int
    compute_s: float
    loss: float
    size_bytes: int
    digest: str
    norms: tuple[float, ...] = ()
    slices: int = 1
    attempt: int = field(default=1, metadata=_COUNT)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A contribution that the plan excludes, and the reason.

    ``kind``: *refused* (it is invalid), *spare* (the round has enough contributors) or *quarantine*
    (its writer joined too recently).
    """

    replica: int
    incarnation: str
    reason: str
    kind: str = "refused"


@dataclass(frozen=True, kw_only=True)
class LateReplica:
    """A live replica whose work for the round enters later.

    ``units`` is its weight before division: 1, or the last known tokens per round of work.
    ``missed`` counts the rounds in a row that it has missed, of any fragment, with this one. The
    two make its part of the denominator (:func:`diloco.protocol.round_weights.room_of`); a replica
    that is ``away`` has none.
    """

    replica: int
    units: float
    missed: int = field(metadata=_COUNT)
    away: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Create-once: the contributions of round ``round``, sorted by replica.

    ``mode`` is the reduce plan: gather, sharded or syncer. ``owners`` are the replica numbers that
    reduce shard 0, 1, ...; empty for gather, where every replica reduces everything. ``late`` are
    the live replicas without a contribution: the weights leave room for them and sum to less than
    one (:func:`diloco.protocol.round_weights.late_replicas`). ``steady_rounds`` counts the rounds
    in a row, with this one, in which no replica became late or brought late work.
    """

    LIMIT: ClassVar[int] = 64 * MEBIBYTE

    round: int
    fragment: int
    mode: str
    planner: Identity
    contributions: tuple[PlannedContribution, ...]
    owners: tuple[int, ...] = ()
    refused: tuple[Refusal, ...] = ()
    late: tuple[LateReplica, ...] = ()
    steady_rounds: int = field(default=0, metadata=_COUNT)
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Commit(Record):
    """Create-once: the linearisation point of a round.

    With an empty ``void``, every replica applies the merged mean of the plan's contributions: in a
    gathered round ``merged_digest`` is its digest; otherwise ``shards`` are the digests of the
    reduced objects, in order. A non-empty ``void`` names the payload that could not be read or
    verified, or the unreadable plan; the round then changes nothing, and ``contributors`` is empty
    in the latter case. ``tokens_total`` counts the tokens of all committed contributions and
    ``committed_total`` the committed rounds, both including this one. ``loss`` is the weighted mean
    of the contributors' losses. ``last`` ends the run.
    """

    round: int
    fragment: int
    committer: Identity
    contributors: tuple[Identity, ...]
    merged_digest: str = ""
    shards: tuple[str, ...] = ()
    void: str
    void_replica: int | None = None
    tokens_total: int
    committed_total: int
    loss: float | None = None
    last: bool = False
    wall_s: float


MAX_KEY = 200
"""Maximum length of a key in a manifest; those of the protocol have half of it."""
MAX_PIECES = 99_999
"""Maximum number of pieces of an object: five digits in a key."""


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object named by a manifest.

    ``checksums`` are those of its parts (:mod:`diloco.protocol.object_digest`). ``sha256`` is
    there for objects that other programs read, and in manifests of version 2, which have no
    checksums. ``pieces`` has the sizes of the objects that together are this one
    (:mod:`diloco.protocol.pieces`), None if it is stored under ``key`` itself.
    """

    key: str
    size_bytes: int
    checksums: str = ""
    sha256: str = ""
    pieces: tuple[int, ...] | None = field(default=None, metadata={OPTIONAL: True})

    def __post_init__(self) -> None:
        pieces = self.pieces
        if pieces is None:
            return
        if not 1 < len(pieces) <= MAX_PIECES or min(pieces) < 1 or sum(pieces) != self.size_bytes:
            raise BadRecord(
                f"{abridged(self.key)}: expected 2 to {MAX_PIECES:,} pieces of {self.size_bytes} "
                f"bytes in total, found {len(pieces)} of {sum(pieces)}"
            )

    @property
    def digest(self) -> str:
        """The digest of the whole object: its sha256 if there is one."""
        return self.sha256 or digest_of(self.checksums)


def _named_below(folder: str, *named: StoredObject | None) -> None:
    """Raise :class:`BadRecord` unless every object is below ``folder`` and every store can have its
    key: readers of a manifest trust the keys in it."""
    for stored in named:
        if stored is None:
            continue
        if not stored.key.startswith(folder) or not _is_key(stored.key):
            raise BadRecord(
                f"expected a manifest of objects below {folder}, found {abridged(stored.key)}"
            )


def _is_key(key: str) -> bool:
    parts = key.split("/")
    return (
        len(key) <= MAX_KEY
        and key.isascii()
        and key.isprintable()
        and not any(sign in key for sign in "\\?#")
        and not any(part in ("", ".", "..") for part in parts)
    )


MAX_TENSORS = 49_900
"""Tensors that the manifest of a checkpoint can list, trained and frozen: each one is an object and
a list of :data:`~diloco.protocol.parsing.MAX_CONTAINERS`."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One trained tensor, for processes without the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    embedding: bool = False


@dataclass(frozen=True, kw_only=True)
class FrozenEntry:
    """One frozen parameter, which replicas do not exchange. ``digest`` is the content digest of its
    bytes; '' if its values were not in memory, and in a group with the setting ``frozen`` local."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(Record):
    """Create-once: one writer's objects with the global weights and outer state after ``round``.

    Version 2 is read too, so that a run of that version can be forked.
    ``base_rounds`` is the newest committed round of each fragment; ``tensors`` lists the trained
    tensors and ``frozen`` the frozen parameters, in the model's order; earlier versions wrote no
    ``frozen`` if there were none, or if their replicas did not compare them.
    """

    LIMIT: ClassVar[int] = 16 * MEBIBYTE
    VERSIONS: ClassVar[tuple[int, ...]] = (2, PROTOCOL)

    round: int
    writer: Identity
    model_hash: str
    base_rounds: tuple[int, ...]
    tensors: tuple[TensorEntry, ...]
    weights_digest: str
    weights: StoredObject
    outer: StoredObject | None
    tokens_total: int
    wall_s: float
    frozen: tuple[FrozenEntry, ...] | None = field(default=None, metadata={OPTIONAL: True})

    def __post_init__(self) -> None:
        _named_below(f"checkpoints/{self.round:08d}/", self.weights, self.outer)


@dataclass(frozen=True, kw_only=True)
class HandedInRound:
    """A round that was open when the writer of a state left, and the incarnation that contributed
    to it."""

    round: int = field(metadata={BOUNDS: (1, keys.LAST_ROUND)})
    incarnation: str

    def __post_init__(self) -> None:
        if not keys.is_incarnation(self.incarnation):
            raise BadRecord(f"expected an incarnation, found {abridged(self.incarnation)}")


@dataclass(frozen=True, kw_only=True)
class ReplicaStateManifest(Record):
    """One replica's private state after ``round``; written last, by its only writer.

    ``tree`` is the JSON skeleton of the state dicts whose tensors are in ``tensors``. The residuals
    of a replica of several ranks are in ``residuals``, of others in ``tensors``. ``handed_in``
    lists contributions to undecided rounds, ``data_step`` is the first step whose data is in none
    of them.
    """

    LIMIT: ClassVar[int] = 64 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 4_000_000

    writer: Identity
    round: int = field(metadata=_ROUND)
    tokens: int = field(metadata=_COUNT)
    tree: Any
    tensors: StoredObject
    residuals: StoredObject | None = field(default=None, metadata={OPTIONAL: True})
    handed_in: tuple[HandedInRound, ...] = ()
    data_step: int = field(default=0, metadata=_COUNT)
    wall_s: float

    def __post_init__(self) -> None:
        _named_below(f"state/{self.writer.replica:05d}/", self.tensors, self.residuals)


@dataclass(frozen=True, kw_only=True)
class FinalManifest(Record):
    """Create-once: the objects of the final export. ``reason`` is completed, stopped or
    token_limit."""

    round: int
    reason: str
    writer: Identity
    weights_digest: str
    weights: StoredObject
    config: StoredObject
    summary: StoredObject
    wall_s: float

    def __post_init__(self) -> None:
        _named_below("final/", self.weights, self.config, self.summary)


@dataclass(frozen=True, kw_only=True)
class FinalSample(Record):
    """Text generated by the final weights of a language model; optional, written by the manifest's
    writer after the manifest.

    ``prompt`` '' is the start of a line; ``text`` does not repeat it. Bytes that are not a
    character are U+FFFD. ``seed`` makes the sample reproducible; ``whole`` False means that
    generation stopped early for lack of time.
    """

    round: int
    prompt: str
    text: str
    temperature: float
    seed: int
    whole: bool
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Command(Record):
    """Create-once, numbered from 1: a command of the control plane to replicas.

    ``replica`` None means all. ``stop`` ends the run at the newest committed round. ``committer``
    (argument: *replica*) selects the coordinator, the one replica that creates objects on a store
    without a conditional write. ``drain`` makes a process contribute its work, save its state and
    leave within *within_s* seconds of reading the command, for a *reason* (both optional); it
    applies to processes up to *incarnation*, or without one to those that had started when it was
    written. ``save`` requests a checkpoint of any round after *round*. ``resume`` cancels earlier
    stops; it is written when a stopped run continues, before its processes start.
    """

    n: int
    command: str
    replica: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float
