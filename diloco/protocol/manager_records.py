"""The JSON records of the torchft-compatible Manager. ``manager_keys`` defines their keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from diloco.protocol.records import MEBIBYTE, Identity, Record, StoredObject


@dataclass(frozen=True, kw_only=True)
class Name(Record):
    """Assigns a number to a member permanently, across restarts of its process."""

    number: int
    replica_id: str
    rank: int
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Join(Record):
    """A member's request to be in the next quorum.

    ``mode`` must be equal in all members of a group, ``allow_heal`` in all members of a round.
    ``branch`` and ``head`` identify the member's state: the branch, and the round whose commit
    produced it (:mod:`manager_branches`).
    """

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
class QuorumMember:
    """A member of a quorum. ``heals``: it loads the first participant's state. ``newest``: the
    round starts from its state."""

    member: int
    incarnation: str
    replica_id: str
    rank: int
    step: int
    heals: bool
    newest: bool = True


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The rounds of a branch up to ``until``, as far as another branch continues them."""

    branch: int
    until: int


@dataclass(frozen=True, kw_only=True)
class Quorum(Record):
    """The members of round ``n``, sorted by replica and rank.

    ``step`` is the step of the state that the round starts from, which round ``head`` of ``branch``
    committed; ``line`` holds the segments before that branch. In a record of an earlier release
    ``head`` is -1: unknown.
    """

    LIMIT: ClassVar[int] = 4 * MEBIBYTE

    n: int
    step: int
    mode: str
    seats: tuple[QuorumMember, ...]
    writer: Identity
    branch: int = 0
    head: int = -1
    line: tuple[Segment, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Vote(Record):
    """Whether a member completed the round, and if not, the error."""

    member: int
    incarnation: str
    ok: bool
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class CommitDecision(Record):
    """The commit decision of a round: the members that are included.

    ``committed``: they are all members that the step needs. ``closed``: the group has continued
    without this round, and nothing more is committed in it.
    """

    n: int
    c: int
    included: tuple[int, ...]
    writer: Identity
    committed: bool = False
    closed: bool = False


@dataclass(frozen=True, kw_only=True)
class Floor(Record):
    """Records of rounds before ``n`` are deleted and must not be created again."""

    n: int


@dataclass(frozen=True, kw_only=True)
class StateManifest(Record):
    """A state tree: its JSON skeleton (:mod:`diloco.model.state_tree`) and the object of its
    tensors.

    ``wall_s`` is the time of writing, for display; 0 if unknown.
    """

    LIMIT: ClassVar[int] = 64 * MEBIBYTE
    CONTAINERS: ClassVar[int] = 4_000_000

    step: int
    writer: Identity
    tree: Any
    tensors: StoredObject
    wall_s: float = 0.0
