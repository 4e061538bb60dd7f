"""The JSON records of the torchft-shaped Manager. ``manager_keys`` says where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from diloco.protocol.records import MEBIBYTE, Identity, Record, StoredObject


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
    ``allow_heal`` what it agrees on in a round. ``branch`` and ``head`` say where its state comes
    from: the branch, and the round whose commit made it (:mod:`manager_branches`)."""

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
    branch: int = -1
    head: int = 0


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A member in a quorum. ``heals``: it takes the first participant's state; ``newest``: its
    own state is the one that the round starts from."""

    member: int
    incarnation: str
    replica_id: str
    rank: int
    step: int
    heals: bool
    newest: bool = True


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The rounds up to ``until`` of a branch, as far as another branch continues them."""

    branch: int
    until: int


@dataclass(frozen=True, kw_only=True)
class Quorum(Record):
    """Who starts round ``n``, by replica and rank; ``step`` is the step of the state it starts
    from, which round ``head`` of ``branch`` committed. ``line`` are the segments before that
    branch. In a record of an earlier release ``head`` is -1: unknown."""

    LIMIT: ClassVar[int] = 4 * MEBIBYTE

    n: int
    step: int
    mode: str
    seats: tuple[Seat, ...]
    writer: Identity
    branch: int = 0
    head: int = -1
    line: tuple[Segment, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Vote(Record):
    """Whether a member came through the round, and if not, why."""

    member: int
    incarnation: str
    ok: bool
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """The commit of a round: the members that are in. ``committed``: they are all that the step
    needs. ``closed``: the group has gone on without this round, nothing more is committed in it."""

    n: int
    c: int
    included: tuple[int, ...]
    writer: Identity
    committed: bool = False
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class Floor(Record):
    """Records of rounds before ``n`` are deleted, and must not be created again."""

    n: int


@dataclass(frozen=True, kw_only=True)
class StateManifest(Record):
    """A state tree: its JSON skeleton (:mod:`diloco.model.state_tree`) and where its tensors are.
    ``wall_s`` is when it was written, for people; 0 where that is not known."""

    LIMIT: ClassVar[int] = 64 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 4_000_000

    step: int
    writer: Identity
    tree: Any
    tensors: StoredObject
    wall_s: float = 0.0
