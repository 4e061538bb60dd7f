"""Problems and notes about a run. Pure functions of a picture.

A *problem* needs the operator; a *note* only explains. The quality of the loss is not assessed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diloco.inspection.picture import (
    ABSENT,
    LATE,
    REFUSED,
    ObservedLease,
    Picture,
    RoundPicture,
)
from diloco.protocol.round_view import GATHER, names

MISSES = 3
"""Consecutive committed rounds without a replica that count as a problem."""
KEPT = 2
"""Newest checkpoints that are never deleted."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem or note, as text."""

    text: str
    problem: bool = True


def findings(picture: Picture) -> tuple[Finding, ...]:
    """Return the findings by severity: those that stop the run come first."""
    return tuple(
        finding
        for find in (
            _end,
            _progress,
            _digests,
            _doubles,
            _members,
            _misses,
            _voids,
            _refusals,
            _losses,
            _checkpoints,
            _unreadable,
            _limits,
        )
        for finding in find(picture)
    )


def _note(text: str) -> Finding:
    return Finding(text=text, problem=False)


# -- progress of the run ---------------------------------------------------------------------------


def _end(picture: Picture) -> Iterator[Finding]:
    if picture.final is not None:
        manifest = picture.final.manifest
        yield _note(f"the run is over after round {manifest.round}: {manifest.reason}")
        for key in picture.final.missing:
            yield Finding(text=f"an object of the final manifest is missing: {key}")
    elif picture.newest is not None and picture.newest.last:
        text = f"round {picture.newest.round} was the last; its final weights are not published yet"
        yield Finding(text=text, problem=not _alive(picture))
    for command in picture.commands:
        target = "all" if command.replica is None else f"replica {command.replica}"
        yield _note(f"command {command.n}: {command.command}, to {target}")


def _progress(picture: Picture) -> Iterator[Finding]:
    """Yield why the next round is not committed, as far as the bucket shows."""
    newest = picture.newest
    if picture.final is not None or (newest is not None and newest.last):
        return
    following = newest.round + 1 if newest else 1
    if not picture.leases:
        yield _note("no replica has joined yet")
        return
    waiting = [shown for shown in picture.rounds if not shown.closed]
    first = next((shown for shown in waiting if shown.round == following), None)
    yield _waiting(picture, following, first)
    for shown in waiting:
        yield from _lost_payloads(shown)


def _waiting(picture: Picture, number: int, shown: RoundPicture | None) -> Finding:
    name, alive = _who(picture)
    if shown is None:
        return Finding(text=f"round {number} has no contribution yet, {name}", problem=not alive)
    if shown.plan is None:
        quorum = picture.document.settings.min_quorum
        here = sorted(r.replica for r in shown.records if r.tokens > 0 and r.steps > 0)
        text = f"round {number} is waiting: quorum {len(here)}/{quorum}, {name}"
        missing = sorted(set(alive) - {arrived.replica for arrived in shown.arrived})
        if missing:
            text += f", missing: {_listed(missing)}"
        return Finding(text=text, problem=not alive)
    plan = shown.plan
    text = f"round {number} is planned by replica {plan.planner.replica}, not committed yet, {name}"
    if plan.mode != GATHER:
        missing = sorted(set(range(len(plan.owners))) - set(shown.reduced))
        owners = sorted({plan.owners[shard] for shard in missing})
        if missing:
            text += f", {len(missing)} of {len(plan.owners)} shards missing, of {names(owners)}"
    return Finding(text=text, problem=not alive)


def _who(picture: Picture) -> tuple[str, list[int]]:
    """Return a text about the replicas that a round waits for, and their numbers. After a single
    look these are all that have not ended."""
    claimants = [m for m in picture.members if not m.ended and m.beat.role == "replica"]
    if not claimants:
        return "all replicas have ended", []
    if any(member.life == "unknown" for member in claimants):
        replicas = [member.beat.replica for member in claimants]
        return f"not ended: {_listed(replicas)}", replicas
    replicas = [member.beat.replica for member in _alive(picture)]
    return (f"live: {_listed(replicas)}" if replicas else "no replica is live"), replicas


def _lost_payloads(shown: RoundPicture) -> Iterator[Finding]:
    payloads = {(a.replica, a.incarnation) for a in shown.arrived if a.payload}
    for identity in shown.contributors:
        if (identity.replica, identity.incarnation) not in payloads:
            yield Finding(text=f"a planned payload of round {shown.round} is missing: {identity}")


# -- replicas --------------------------------------------------------------------------------------


def _alive(picture: Picture) -> list[ObservedLease]:
    return [m for m in picture.members if m.life == "live" and m.beat.role == "replica"]


def _doubles(picture: Picture) -> Iterator[Finding]:
    """Yield replicas with several live incarnations. This is normal for a moment: the older one
    exits when it sees the newer."""
    live_incarnations: dict[int, list[str]] = defaultdict(list)
    for lease in picture.leases:
        if lease.life == "live":
            live_incarnations[lease.beat.replica].append(lease.beat.incarnation)
    for replica, incarnations in live_incarnations.items():
        if len(incarnations) > 1:
            yield Finding(
                text=f"{_count(len(incarnations))} incarnations of replica {replica} are live: "
                + ", ".join(incarnations)
            )


def _members(picture: Picture) -> Iterator[Finding]:
    for member in picture.members:
        beat = member.beat
        name = f"{beat.role} {beat.replica}"
        if beat.state == "failed":
            yield Finding(text=f"{name} failed: {beat.message or 'no reason given'}")
        elif member.life == "dead":
            timeout_s = picture.document.settings.heartbeat_timeout_s
            text = f"{name} is dead: its lease has not changed for {timeout_s:g} s"
            yield Finding(text=text, problem=not picture.over)
        elif member.life == "silent":
            text = (
                f"{name} has sent no heartbeat for {member.silent_s:.1f} s, its interval is "
                f"{beat.interval_s:g} s"
            )
            yield Finding(text=text, problem=not picture.over)


def _misses(picture: Picture) -> Iterator[Finding]:
    """Yield replicas that missed the newest shown committed rounds."""
    committed = [shown for shown in picture.rounds if shown.state == "committed"]
    for member in picture.members:
        if member.beat.role != "replica" or member.ended:
            continue
        replica = member.beat.replica
        here_since = _first_possible_round(picture, member)
        run: list[tuple[int, str]] = []
        for shown in reversed(committed):
            mark = picture.mark(replica, shown)
            if mark not in (ABSENT, LATE, REFUSED) or shown.round < here_since:
                break
            run.append((shown.round, mark))
        if len(run) >= MISSES:
            marks = {mark for _, mark in run}
            labels = {LATE: "late", REFUSED: "refused", ABSENT: "absent"}
            text = (
                f"replica {replica}: {len(run)} misses in a row, rounds {run[-1][0]} to "
                f"{run[0][0]} ({' or '.join(labels[m] for m in labels if m in marks)})"
            )
            yield Finding(text=text, problem=not picture.over)


def _first_possible_round(picture: Picture, member: ObservedLease) -> int:
    """Return the first shown round in which the replica can have taken part: earlier rounds are not
    misses."""
    replica = member.beat.replica
    rounds = [
        shown.round
        for shown in picture.rounds
        if picture.mark(replica, shown) != ABSENT or picture.outcome(replica, shown.round)
    ]
    return min([member.beat.round, *rounds])


# -- rounds ----------------------------------------------------------------------------------------


def _digests(picture: Picture) -> Iterator[Finding]:
    """Yield rounds whose global weights differ between replicas (invariant I3)."""
    by_round: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for reported in picture.reports:
        report = reported.report
        if report.weights_digest:
            by_round[report.round][report.weights_digest].add(reported.identity.replica)
    for number, digests in sorted(by_round.items()):
        if len(digests) > 1:
            sides = "; ".join(
                f"{digest[:12]} at {names(sorted(replicas))}"
                for digest, replicas in sorted(digests.items(), key=lambda item: -len(item[1]))
            )
            yield Finding(text=f"weights digests differ in round {number}: {sides}")


def _voids(picture: Picture) -> Iterator[Finding]:
    for shown in picture.rounds:
        if shown.commit is not None and shown.commit.void:
            yield _note(f"round {shown.round} is void: {shown.commit.void}")


def _refusals(picture: Picture) -> Iterator[Finding]:
    """Yield one finding per replica and kind, with the newest reason."""
    seen: dict[tuple[int, str], list[int]] = defaultdict(list)
    reasons: dict[tuple[int, str], str] = {}
    for shown in picture.rounds:
        for refusal in shown.plan.refused if shown.plan else ():
            seen[refusal.replica, refusal.kind].append(shown.round)
            reasons[refusal.replica, refusal.kind] = refusal.reason
    for (replica, kind), rounds in sorted(seen.items()):
        label = {"refused": "was refused", "spare": "was spare"}.get(kind, "was in quarantine")
        yield Finding(
            text=f"replica {replica} {label} in {_rounds(rounds)}: {reasons[replica, kind]}",
            problem=kind == "refused",
        )


def _losses(picture: Picture) -> Iterator[Finding]:
    for shown in picture.rounds:
        loss = shown.commit.loss if shown.commit else None
        if loss is not None and not math.isfinite(loss):
            yield Finding(text=f"round {shown.round}: expected a finite loss, found {loss}")


# -- objects ---------------------------------------------------------------------------------------


def _checkpoints(picture: Picture) -> Iterator[Finding]:
    for index, checkpoint in enumerate(reversed(picture.checkpoints)):
        if index < KEPT:
            for key in checkpoint.missing:
                text = f"an object of checkpoint {checkpoint.manifest.round} is missing: {key}"
                yield Finding(text=text)
    if picture.leases and picture.newest is not None and not picture.checkpoints:
        yield Finding(text="there are commits but no checkpoint, so no replica can join")
    for number in picture.unfinished_checkpoints:
        yield _note(f"checkpoint {number} has objects but no manifest: being written, or abandoned")


def _unreadable(picture: Picture) -> Iterator[Finding]:
    for bad in picture.unreadable:
        yield Finding(text=f"{bad.key} cannot be read: {bad.reason}")


def _limits(picture: Picture) -> Iterator[Finding]:
    if picture.truncated:
        yield _note(f"only the newest telemetry of {names(list(picture.truncated))} was read")


# -- formatting ------------------------------------------------------------------------------------


def _listed(replicas: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(replicas)))


def _count(number: int) -> str:
    return {2: "two", 3: "three"}.get(number, str(number))


def _rounds(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"round {numbers[0]}"
    if len(numbers) > 4:
        return f"{len(numbers)} rounds, the last {numbers[-1]}"
    return "rounds " + ", ".join(map(str, numbers))
