"""The state of a run as read from its bucket: frozen dataclasses for text, JSON and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import (
    ENDED_STATES,
    CheckpointManifest,
    Command,
    Commit,
    ContributionRecord,
    FinalManifest,
    Heartbeat,
    Identity,
    Plan,
)
from diloco.protocol.telemetry import Evaluation, RoundReport

# A contribution's outcome: one character in the grid of replicas and rounds.
INCLUDED, LATE, REFUSED, SPARE, QUARANTINE, VOID, HERE, ABSENT = "#lrsqv+."
MARKS = {
    INCLUDED: "included",
    LATE: "late",
    REFUSED: "refused",
    SPARE: "spare",
    QUARANTINE: "in quarantine",
    VOID: "in a void round",
    HERE: "present, not committed yet",
    ABSENT: "absent",
}
_REFUSAL_MARKS = {"refused": REFUSED, "spare": SPARE, "quarantine": QUARANTINE}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Number and total bytes of objects."""

    objects: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """An object whose content is invalid."""

    key: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ObservedLease:
    """One incarnation's lease; ``life`` is the result of several looks:

    *live* (it changed), *silent* (unchanged for ``silent_s`` on the observer's clock), *dead*
    (unchanged for the group's heartbeat timeout), *ended* (by its own state), *unknown* (one look
    only).
    """

    beat: Heartbeat
    life: str
    silent_s: float = 0.0

    @property
    def identity(self) -> Identity:
        return Identity(replica=self.beat.replica, incarnation=self.beat.incarnation)

    @property
    def ended(self) -> bool:
        return self.beat.state in ENDED_STATES


@dataclass(frozen=True, kw_only=True)
class StoredContribution:
    """A contribution whose record is in the bucket. ``payload``: its payload is, too."""

    replica: int
    incarnation: str
    payload: bool


@dataclass(frozen=True, kw_only=True)
class RoundPicture:
    """One round.

    ``records`` are read only for rounds without a plan, because a plan repeats them. ``reduced``
    are the shards whose mean is stored. ``sizes`` are by kind of object.
    """

    round: int
    fragment: int
    plan: Plan | None = None
    commit: Commit | None = None
    arrived: tuple[StoredContribution, ...] = ()
    records: tuple[ContributionRecord, ...] = ()
    reduced: tuple[int, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """One of open, planned, committed and void."""
        if self.commit is not None:
            return "void" if self.commit.void else "committed"
        return "planned" if self.plan is not None else "open"

    @property
    def closed(self) -> bool:
        return self.commit is not None

    @property
    def contributors(self) -> tuple[Identity, ...]:
        """The writers of the planned contributions, sorted by replica."""
        if self.plan is None:
            return self.commit.contributors if self.commit else ()
        return tuple(
            Identity(replica=c.replica, incarnation=c.incarnation) for c in self.plan.contributions
        )

    @property
    def tokens(self) -> int:
        """Tokens that no earlier round counted."""
        return sum(c.new_tokens for c in self.plan.contributions) if self.plan else 0

    @property
    def payload_bytes(self) -> int:
        return sum(c.size_bytes for c in self.plan.contributions) if self.plan else 0

    def mark(self, replica: int, *, reported_late: bool = False) -> str:
        """Return the outcome of a replica's contribution, a key of :data:`MARKS`."""
        if any(identity.replica == replica for identity in self.contributors):
            return {"committed": INCLUDED, "void": VOID}.get(self.state, HERE)
        refused = self.plan.refused if self.plan else ()
        for refusal in refused:
            if refusal.replica == replica:
                return _REFUSAL_MARKS.get(refusal.kind, REFUSED)
        if any(arrived.replica == replica for arrived in self.arrived):
            return LATE if self.plan or self.commit else HERE
        return LATE if reported_late else ABSENT


@dataclass(frozen=True, kw_only=True)
class CheckpointPicture:
    """A checkpoint; ``missing`` are the keys in its manifest that have no object."""

    manifest: CheckpointManifest
    missing: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        named = (self.manifest.weights, self.manifest.outer)
        return sum(stored.size_bytes for stored in named if stored is not None)


@dataclass(frozen=True, kw_only=True)
class FinalPicture:
    """The final export; ``missing`` are the keys in its manifest that have no object."""

    manifest: FinalManifest
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One replica's telemetry about one round."""

    identity: Identity
    report: RoundReport


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The state of a run.

    ``newest`` is the newest commit, even if it is not in ``rounds``. ``checkpoints`` are the newest
    few, sorted by round. ``truncated`` replicas have more telemetry than was read. ``sizes`` cover
    the whole bucket if ``whole``, else only the objects that were listed.
    """

    uri: str
    document: GroupDocument
    leases: tuple[ObservedLease, ...] = ()
    incarnations: Mapping[int, int] = field(default_factory=dict)
    newest: Commit | None = None
    rounds: tuple[RoundPicture, ...] = ()
    checkpoints: tuple[CheckpointPicture, ...] = ()
    unfinished_checkpoints: tuple[int, ...] = ()
    final: FinalPicture | None = None
    commands: tuple[Command, ...] = ()
    saved_states: Mapping[int, int] = field(default_factory=dict)
    reports: tuple[Reported, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    truncated: tuple[int, ...] = ()
    sizes: Mapping[str, Size] = field(default_factory=dict)
    whole: bool = False
    unreadable: tuple[Unreadable, ...] = ()

    @property
    def members(self) -> tuple[ObservedLease, ...]:
        """The newest incarnation of each replica, sorted by replica."""
        newest: dict[int, ObservedLease] = {}
        for lease in sorted(self.leases, key=lambda lease: lease.identity):
            newest[lease.beat.replica] = lease
        return tuple(newest.values())

    @property
    def replicas(self) -> tuple[int, ...]:
        """Every known replica number; a syncer only if it contributed."""
        known = {m.beat.replica for m in self.members if m.beat.role == "replica"}
        for shown in self.rounds:
            known |= {identity.replica for identity in shown.contributors}
            known |= {arrived.replica for arrived in shown.arrived}
        return tuple(sorted(known))

    @property
    def over(self) -> bool:
        """Whether the final manifest exists."""
        return self.final is not None

    def outcome(self, replica: int, round: int) -> str:
        """Return the outcome that a replica reported for a round: included, late, void, or ''
        without a report."""
        for r in self.reports:
            if (r.identity.replica, r.report.round) == (replica, round):
                return r.report.outcome
        return ""

    def mark(self, replica: int, shown: RoundPicture) -> str:
        """Return the outcome of a replica's contribution, including late ones that only telemetry
        shows."""
        late = self.outcome(replica, shown.round) == "late"
        return shown.mark(replica, reported_late=late)
