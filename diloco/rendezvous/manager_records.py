"""The JSON records of the torchft-shaped Manager. ``manager_keys`` says where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from diloco.rendezvous.records import MEBIBYTE, Identity, Record, StoredObject


@dataclass(frozen=True, kw_only=True)
class Name(Record):
    """Gives a member its number for ever, whatever process it is."""

    number: int
    replica_id: str
    rank: int
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Join(Record):
    """A member wants to be in the next quorum. ``mode`` is what a group agrees on for good,
    ``allow_heal`` what it agrees on in a round."""

    member: int
    incarnation: str
    replica_id: str
    rank: int
    world_size: int
    step: int
    min_replicas: int
    init_sync: bool
    shrink_only: bool
    allow_heal: bool
    mode: str


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A member in a quorum. ``heals``: it takes the first participant's state."""

    member: int
    incarnation: str
    replica_id: str
    rank: int
    step: int
    heals: bool


@dataclass(frozen=True, kw_only=True)
class Quorum(Record):
    """Who starts round ``n``, by replica and rank; ``step`` is the newest step among them."""

    LIMIT: ClassVar[int] = 4 * MEBIBYTE

    n: int
    step: int
    mode: str
    seats: tuple[Seat, ...]
    writer: Identity


@dataclass(frozen=True, kw_only=True)
class Vote(Record):
    """Whether a member came through the round, and if not, why."""

    member: int
    incarnation: str
    ok: bool
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """The commit of a round: the members that are in. ``writer`` is who was first to say so."""

    n: int
    c: int
    included: tuple[int, ...]
    writer: Identity


@dataclass(frozen=True, kw_only=True)
class StateManifest(Record):
    """A state tree: its JSON skeleton (:mod:`diloco.tree`) and where its tensors are."""

    LIMIT: ClassVar[int] = 64 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 4_000_000

    step: int
    writer: Identity
    tree: Any
    tensors: StoredObject
