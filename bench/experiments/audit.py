"""Audit of a run's log from its bucket alone: was any round skipped, doubled or built on sand?

:func:`audit` reads commits, plans, contribution records, telemetry and returns what it found wrong,
in words, beside the figures. It trusts nothing but the objects, and needs no replica alive.

Left out: the payloads themselves (they are swept) and clocks, which it reads only for figures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from bench.support.segments import every_segment
from diloco.protocol import keys
from diloco.protocol.packed_rounds import PackedRounds
from diloco.protocol.records import Commit, ContributionRecord, Identity, Plan
from diloco.protocol.telemetry import Segment
from diloco.store.base import Store

Life = tuple[int, str]
"""(replica, incarnation)"""


@dataclass(frozen=True, kw_only=True)
class Log:
    """The records in a bucket. ``records`` and ``plans`` by round; ``segments`` in order by life.
    ``round_steps`` is how many steps a life makes in a round, None if that varies."""

    commits: tuple[Commit, ...]
    plans: dict[int, Plan]
    records: dict[int, dict[Life, ContributionRecord]]
    segments: dict[Life, tuple[Segment, ...]]
    fragments: int = 1
    round_steps: int | None = None

    @property
    def committed(self) -> list[Commit]:
        return [commit for commit in self.commits if not commit.void]


def read_log(store: Store, *, fragments: int = 1, round_steps: int | None = None) -> Log:
    commits: dict[int, Commit] = {}
    plans: dict[int, Plan] = {}
    records: dict[int, dict[Life, ContributionRecord]] = defaultdict(dict)
    for info in store.list(keys.ROUNDS):
        round = int(info.key.split("/")[1])
        if info.key == keys.commit(round):
            commits[round] = Commit.from_bytes(store.get(info.key))
        elif info.key == keys.plan(round):
            plans[round] = Plan.from_bytes(store.get(info.key))
        elif parsed := keys.parse_contribution_record(info.key):
            record = ContributionRecord.from_bytes(store.get(info.key))
            records[round][parsed[1:]] = record
    packs = PackedRounds(store)
    for round in sorted(commits):
        for key in packs.packed_contributions(round):
            record = ContributionRecord.from_bytes(packs.get(key))
            records[round][record.replica, record.incarnation] = record
    segments: dict[Life, list[Segment]] = defaultdict(list)
    for segment in map(Segment.from_bytes, every_segment(store)):
        segments[segment.replica, segment.incarnation].append(segment)
    return Log(
        commits=tuple(commits[round] for round in sorted(commits)),
        plans=plans,
        records=dict(records),
        segments={life: tuple(found) for life, found in segments.items()},
        fragments=fragments,
        round_steps=round_steps,
    )


def audit(log: Log) -> list[str]:
    """Return the faults of a run's log."""
    return [*_contiguous(log), *_plans(log), *_bases(log), *_agreement(log), *_once(log)]


def _contiguous(log: Log) -> Iterable[str]:
    """Commits 1..R without a gap; totals grow by exactly the amounts in each commit."""
    committed = tokens = 0
    for n, commit in enumerate(log.commits, start=1):
        if commit.round != n:
            yield f"expected a commit of round {n}, found round {commit.round}"
            return
        if not commit.void and n in log.plans:
            committed += 1
            tokens += sum(c.new_tokens for c in log.plans[n].contributions)
        if (commit.committed_total, commit.tokens_total) != (committed, tokens):
            yield (
                f"round {n}: expected totals of {committed} rounds and {tokens} tokens, found "
                f"{commit.committed_total} and {commit.tokens_total}"
            )
            committed, tokens = commit.committed_total, commit.tokens_total


def _plans(log: Log) -> Iterable[str]:
    """A plan for every commit, with the same contributors, at most one of a replica."""
    for commit in log.commits:
        plan = log.plans.get(commit.round)
        if plan is None:
            yield f"round {commit.round}: expected a plan, found none"
            continue
        planned = tuple(
            Identity(replica=c.replica, incarnation=c.incarnation) for c in plan.contributions
        )
        if planned != commit.contributors:
            yield f"round {commit.round}: the commit names other contributors than the plan"
        for replica, count in Counter(c.replica for c in commit.contributors).items():
            if count > 1:
                yield f"round {commit.round}: replica {replica} is named {count} times"


def _bases(log: Log) -> Iterable[str]:
    """Every planned contribution stands on the newest committed round of its fragment."""
    newest = dict.fromkeys(range(log.fragments), 0)
    for commit in log.commits:
        fragment = (commit.round - 1) % log.fragments
        bases = set()
        for contributor in commit.contributors:
            life = (contributor.replica, contributor.incarnation)
            record = log.records.get(commit.round, {}).get(life)
            if record is None:
                yield f"round {commit.round}: expected a record of {contributor}, found none"
                continue
            bases.add(record.base_digest)
            if (record.fragment, record.base_round) != (fragment, newest[fragment]):
                yield (
                    f"round {commit.round}: expected base round {newest[fragment]} of fragment "
                    f"{fragment} from {contributor}, found {record.base_round} of {record.fragment}"
                )
        if len(bases) > 1:
            yield f"round {commit.round}: expected one base, found {len(bases)} different ones"
        if not commit.void:
            newest[fragment] = commit.round


def _agreement(log: Log) -> Iterable[str]:
    """All who followed a round ended it with the same global weights."""
    digests: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (replica, _), segments in log.segments.items():
        for segment in segments:
            for report in segment.rounds:
                # A late one reports the newest weights, which may be those of a later round.
                if report.outcome == "included":
                    digests[report.round][report.weights_digest].append(replica)
    for round, found in sorted(digests.items()):
        if len(found) > 1:
            yield f"round {round}: global weights differ between replicas {list(found.values())}"


def _once(log: Log) -> Iterable[str]:
    """No work counts twice: a life has at most as many steps in the mean as it has made, and in
    one contribution at most those since its last one. Each fragment counts a step once.
    """
    yield from _since_last(log)
    limit = _steps_made(log)
    counted: dict[tuple[Life, int], int] = defaultdict(int)
    for commit in log.committed:
        fragment = (commit.round - 1) % log.fragments
        for c in log.plans[commit.round].contributions if commit.round in log.plans else ():
            counted[(c.replica, c.incarnation), fragment] += c.steps
    for (life, fragment), steps in sorted(counted.items()):
        if life in limit and steps > limit[life]:
            yield (
                f"replica {life[0]} ({life[1]}): expected at most the {limit[life]} steps it made "
                f"in fragment {fragment}, found {steps} counted"
            )


def _since_last(log: Log) -> Iterable[str]:
    last: dict[tuple[Life, int], int] = {}
    for commit in log.committed if log.round_steps else ():
        fragment = (commit.round - 1) % log.fragments
        for c in log.plans[commit.round].contributions if commit.round in log.plans else ():
            here = (c.replica, c.incarnation), fragment
            since = commit.round - last.get(here, 0)
            if c.steps > since * (log.round_steps or 0):
                yield (
                    f"round {commit.round}: expected at most the steps of {since} rounds from "
                    f"replica {c.replica} ({c.incarnation}), found {c.steps}"
                )
            last[here] = commit.round


def _steps_made(log: Log) -> dict[Life, int]:
    """Steps of each life whose telemetry is whole to the end; a killed one's last is lost."""
    return {
        life: sum(len(segment.steps.step) for segment in segments)
        for life, segments in log.segments.items()
        if segments[-1].last
    }
