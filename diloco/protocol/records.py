"""The JSON records of the rendezvous, as frozen dataclasses.

Every record carries ``v``, the protocol version, and is checked field by field when read:
a record that is not exactly what its class says raises :class:`BadRecord` and is never used
(invariant I7). Sizes are bytes, durations seconds; ``*_wall_s`` are for people only (I5).
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Self, Union

from diloco.protocol.group_document import PROTOCOL
from diloco.protocol.parsing import MAX_CONTAINERS, abridged, check_depth, parse_json
from diloco.store.base import NotAnObject, ObjectTooLarge, Store

INT_LIMIT = 2**63
MEBIBYTE = 1 << 20


class BadRecord(ValueError):
    """A record is not JSON, of another version, or lacks or misstates a field."""


class Growing:
    """What may have fields that a reader of earlier code does not know, and leaves out."""


BLANKS = b" \t"
OPTIONAL = "optional"
"""In a field's metadata: it is not written while it is None. Earlier readers do not know it."""


def seal(body: bytes) -> bytes:
    """The checksum that follows a record: a line feed, then the crc32 of ``body``, highest bit
    first, a space for 0 and a tab for 1.

    JSON allows blanks after a value, so readers that do not know the seal read the record as ever.
    """
    crc = zlib.crc32(body)
    return b"\n" + bytes(BLANKS[crc >> shift & 1] for shift in range(31, -1, -1))


def unsealed(data: bytes, where: str) -> bytes:
    """``data`` without its seal. Raises :class:`BadRecord` if the seal is not that of the rest;
    a record without a seal is of an earlier writer."""
    body = data.rstrip(b" \t\r\n")
    found = data[len(body) :]
    if found not in (b"", b"\n", seal(body)):
        raise BadRecord(f"{where}: expected the checksum of what is written, found another")
    return body


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of all records: strict JSON in, compact JSON with a :func:`seal` out.

    ``LIMIT`` is the size in bytes, ``CONTAINERS`` the number of objects and lists, of the largest
    one that is read: with room to spare above what the largest group writes.
    """

    LIMIT: ClassVar[int] = MEBIBYTE
    CONTAINERS: ClassVar[int] = MAX_CONTAINERS

    def to_bytes(self) -> bytes:
        values = dataclasses.asdict(self)
        for f in dataclasses.fields(self):
            if f.metadata.get(OPTIONAL) and values[f.name] is None:
                del values[f.name]
        body = {"v": PROTOCOL, **values}
        text = json.dumps(body, separators=(",", ":"), allow_nan=True).encode()
        return text + seal(text)

    @classmethod
    def read(cls, store: Store, key: str) -> Self:
        """The record under a key. Raises :class:`BadRecord` for an object that is no such record or
        larger than ``LIMIT``, and what the store raises: :class:`MissingKey` and the others."""
        try:
            data = store.get(key, limit=cls.LIMIT)
        except ObjectTooLarge as error:
            raise BadRecord(
                f"{cls.__name__}: expected at most {error.limit} bytes, found more"
            ) from None
        except NotAnObject as error:
            raise BadRecord(f"{cls.__name__}: {error}") from None
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        if len(data) > cls.LIMIT:
            raise BadRecord(
                f"{cls.__name__}: expected at most {cls.LIMIT} bytes, found {len(data)}"
            )
        data = unsealed(data, cls.__name__)
        try:
            body = parse_json(data, containers=cls.CONTAINERS)
        except ValueError as error:
            raise BadRecord(f"{cls.__name__}: expected JSON, found {error}") from None
        if not isinstance(body, dict) or body.pop("v", None) != PROTOCOL:
            raise BadRecord(f"{cls.__name__}: expected version {PROTOCOL}")
        value = _read(cls, body, cls.__name__)
        assert isinstance(value, cls)
        return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _read(hint: Any, value: Any, where: str) -> Any:
    """``value`` as ``hint``, or :class:`BadRecord`. Knows just what records are made of."""
    if hint is Any:
        try:
            check_depth(value, where)
        except ValueError as error:
            raise BadRecord(str(error)) from None
        return value
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, dict):
            raise BadRecord(f"{where}: expected an object, found {type(value).__name__}")
        names = _hints(hint)
        fields = {f.name: f for f in dataclasses.fields(hint)}
        strange = set(value) - set(fields)
        if strange and not issubclass(hint, Growing):
            raise BadRecord(f"{where}: unknown field {abridged(min(strange))}")
        for name, f in fields.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if name not in value and required:
                raise BadRecord(f"{where}: expected a field {name!r}, found none")
        known = {n: v for n, v in value.items() if n in fields}
        return hint(**{n: _read(names[n], v, f"{where}.{n}") for n, v in known.items()})
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise BadRecord(f"{where}: expected a list, found {type(value).__name__}")
        # Columns of a segment are hundreds of numbers: looked at one by one only if any is odd.
        if arguments[0] is float and set(map(type, value)) <= {float}:
            return tuple(value)
        if arguments[0] is int and set(map(type, value)) <= {int}:
            for item in (min(value), max(value)) if value else ():
                _read(int, item, where)
            return tuple(value)
        return tuple(_read(arguments[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise BadRecord(f"{where}: expected an object, found {type(value).__name__}")
        return {k: _read(arguments[1], v, where) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise BadRecord(f"{where}: expected a float, found a number beyond them") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise BadRecord(f"{where}: expected {hint.__name__}, found {abridged(value)}")
    if hint is int and not -INT_LIMIT <= value < INT_LIMIT:
        raise BadRecord(f"{where}: expected an integer of 64 bits, found {abridged(value)}")
    return value


@dataclass(frozen=True, kw_only=True, order=True)
class Identity:
    """A replica number and one process start of it."""

    replica: int
    incarnation: str

    def __str__(self) -> str:
        return f"replica {self.replica} ({self.incarnation})"


@dataclass(frozen=True, kw_only=True)
class Beat(Record):
    """The lease, overwritten by its one writer. Observers watch whether ``count`` changes.

    ``role`` is replica, or syncer for a process that only reduces. ``state`` is a
    :data:`REPLICA_STATES` name; ``left`` says the process ended on purpose. ``round`` is the round
    the replica is working towards, ``step`` its inner step in the run. ``blocked`` is a committed
    round that it cannot read: it needs a checkpoint of that round or a later one.
    """

    LIMIT: ClassVar[int] = 256 * 1024

    replica: int
    incarnation: str
    count: int
    interval_s: float
    role: str = "replica"
    state: str
    round: int
    step: int
    tokens: int
    loss: float | None = None
    started_wall_s: float
    wall_s: float
    host: str = ""
    pid: int = 0
    device: str = ""
    message: str = ""
    blocked: int | None = field(default=None, metadata={OPTIONAL: True})


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
STEPPING_STATES = frozenset({"computing", "uploading", "applying"})
"""Of one that has come to its first inner step."""


@dataclass(frozen=True, kw_only=True)
class ContributionRecord(Record):
    """Names one payload that is already durable (invariant I2).

    ``base_round`` is the committed round whose global weights the pseudo-gradient was taken from
    (0: checkpoint 0), ``base_digest`` the digest of those weights, both of this fragment.
    ``norms`` are the L2 norms of the *decoded* pseudo-gradient, one per tensor of the fragment,
    ``norm`` of the whole. ``checksums`` is the hex crc of each block, eight digits a block;
    ``digest`` pins header and checksums, and so the whole payload (:mod:`diloco.exchange.payload`).
    ``tokens`` and ``steps`` are those since the base, ``new_tokens`` those that no earlier
    contribution of the replica counted (with fragments, a token is in several).
    ``rounds_here`` counts the rounds this incarnation has followed since it joined.
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
    loss: float
    norm: float
    norms: tuple[float, ...] = ()
    size_bytes: int
    digest: str
    checksums: str
    compute_s: float
    encode_s: float
    rounds_here: int = 0
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class PlannedContribution:
    """One line of a plan: whose payload, how heavy, how big, and how to check any part of it.

    ``norms`` are there where the merge needs them (RDA).
    """

    replica: int
    incarnation: str
    weight: float
    tokens: int
    new_tokens: int
    steps: int
    compute_s: float
    loss: float
    size_bytes: int
    digest: str
    checksums: str
    norms: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A contribution that was not let in, and why.

    ``kind``: *refused* (something is wrong with it), *spare* (the world is full) or *quarantine*
    (its writer is too fresh).
    """

    replica: int
    incarnation: str
    reason: str
    kind: str = "refused"


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Create-once: who is in round ``round``, sorted by replica.

    ``mode`` is the reduce plan: gather, sharded or syncer. ``owners`` are the replica numbers that
    reduce shard 0, 1, ...; empty for gather, where everyone reduces all.
    """

    LIMIT: ClassVar[int] = 64 * MEBIBYTE

    round: int
    fragment: int
    mode: str
    planner: Identity
    contributions: tuple[PlannedContribution, ...]
    owners: tuple[int, ...] = ()
    refused: tuple[Refusal, ...] = ()
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Commit(Record):
    """Create-once, THE linearisation point of a round.

    With ``void`` empty, the merged mean of the plan's contributions is applied by everyone:
    ``merged_digest`` is its digest in a gathered round; otherwise ``shards`` are the digests of
    the reduced objects, in order. Else ``void`` says which planned payload, or that the plan, could
    not be read or verified, and the round changes nothing; ``contributors`` is empty if it was the
    plan. ``tokens_total`` counts every token of
    every committed contribution, ``committed_total`` every committed round, up to and with this
    one. ``last`` ends the run.
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


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object named by a manifest."""

    key: str
    size_bytes: int
    sha256: str


def _named_below(folder: str, *named: StoredObject | None) -> None:
    """A manifest names objects of its own folder: what it says is read by whoever trusts it."""
    for stored in named:
        if stored is None:
            continue
        inner = stored.key.removeprefix(folder)
        if inner == stored.key or any(part in ("", ".", "..") for part in inner.split("/")):
            raise BadRecord(f"expected a manifest of objects below {folder}, found {stored.key!r}")


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One trained tensor of the model, for processes that have no model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    embedding: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(Record):
    """Create-once: one writer's objects hold the global weights and outer state after ``round``.

    ``base_rounds`` is the newest committed round of each fragment, ``tensors`` what the model is
    made of, in its own order.
    """

    LIMIT: ClassVar[int] = 16 * MEBIBYTE

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

    def __post_init__(self) -> None:
        _named_below(f"checkpoints/{self.round:08d}/", self.weights, self.outer)


@dataclass(frozen=True, kw_only=True)
class HandedInRound:
    """A round that was open when the writer of a state left, and the process whose contribution to
    it lies there."""

    round: int
    incarnation: str


@dataclass(frozen=True, kw_only=True)
class ReplicaStateManifest(Record):
    """One replica's own state after ``round``; written last, by its one writer. ``tree`` is the
    JSON skeleton of the state dicts whose tensors lie in ``tensors``.

    ``handed_in`` are contributions that were made and not decided upon yet, ``data_step`` the first
    step whose data is in none of them.
    """

    LIMIT: ClassVar[int] = 64 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 4_000_000

    writer: Identity
    round: int
    tokens: int
    tree: Any
    tensors: StoredObject
    handed_in: tuple[HandedInRound, ...] = ()
    data_step: int = 0
    wall_s: float

    def __post_init__(self) -> None:
        _named_below(f"state/{self.writer.replica:05d}/", self.tensors)


@dataclass(frozen=True, kw_only=True)
class FinalManifest(Record):
    """Create-once: where the result lies. ``reason`` is completed, stopped or token_limit."""

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
    """Text that the final weights of a language model go on with, beside the result it is of; not
    every result has one. By the manifest's writer, after the manifest.

    ``prompt`` '' is the start of a line; ``text`` does not repeat it. Bytes that are no character
    are U+FFFD. ``seed`` makes it repeatable; ``whole`` False says that time was over before the
    text was as long as it should be.
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
    """Create-once, numbered from 1: what the control plane asks of replicas.

    ``replica`` None means all. ``stop`` ends the run at the newest committed round. ``committer``
    (arguments: *replica*) names the one replica that may create, on a store without an atomic
    create. ``drain`` asks a process to hand in its work, save its state and leave, *within_s*
    seconds from when it reads this, for a *reason* (both may be left out). It is for processes up
    to *incarnation*; without one, for those that had started when it was written. ``save`` asks for
    a checkpoint of any round after *round*, in good time. ``resume`` takes back the stops before
    it: it is written when a run that was stopped goes on, before its processes start.
    """

    n: int
    command: str
    replica: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float
