"""Runs one seed: generates a scenario, runs it and checks the result with the oracle."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass

import torch

from diloco.errors import FencedOut, ReplicaError, RoundTimeout
from diloco.protocol import keys
from diloco.protocol.round_weights import keeps_late_work
from diloco.protocol.settings import GroupSettings
from diloco.store.base import StoreDenied
from tests.diloco.model import oracle
from tests.diloco.model.faulty_bucket import LIST_LAG_S, Chances
from tests.diloco.model.harness import Harness, Life, Scenario, virtual
from tests.diloco.model.virtual_time import Hang

QUORUM_S = 900.0
"""Seconds after the last fault during which a round can time out because replicas are missing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one seed; ``failure`` is '' if every check passed."""

    seed: int
    scenario: Scenario
    failure: str
    counts: Counter[str]
    processes: int
    rounds: int
    virtual_s: float


def make_scenario(rng: random.Random) -> Scenario:
    """Return settings and faults: everything that the seed determines before the run begins."""
    replicas = rng.randint(2, 4)
    plan = rng.choice(["gather", "sharded", "syncer"])
    fragments, sync_every, overlap = rng.choice(
        [(1, 3, 0), (1, 4, 2), (2, 4, 0), (2, 4, 1), (2, 4, 3), (4, 8, 3), (1, 24, 0), (2, 24, 20)]
    )
    fixed = rng.random() < 0.15
    mixing_alpha, total_rounds = rng.choice([0.5, 1.0]), rng.randint(6, 14)
    settings = GroupSettings(
        sync_every=sync_every,
        num_fragments=fragments,
        overlap_steps=overlap,
        mixing_alpha=mixing_alpha,
        total_rounds=total_rounds,
        partial_rounds="on" if total_rounds % 2 else "off",  # without a draw: seeds keep their runs
        num_replicas=replicas,
        min_quorum=replicas if fixed else rng.randint(1, replicas),
        world_size_mode="fixed_with_spares" if fixed else "dynamic",
        reduce_plan=plan,
        codec=rng.choice(["fp32", "fp32", "bf16", "int8"]),
        late_keep=rng.choice([1.0, 0.5, 0.0]),
        weighting=rng.choice(["uniform", "tokens"]),
        quarantine_rounds=rng.choice([0, 0, 1, 3]),
        checkpoint_every=rng.randint(1, 4),
        state_every=rng.choice([0, 1, 3]),
        warmup_steps=0,
        eval_every=0,
        start_wait_s=30.0,
        grace_s=rng.choice([2.0, 20.0]),
        heartbeat_timeout_s=15.0,
        round_timeout_s=300.0,
    )
    chosen = {
        "kill": (0.0, 0.002, 0.01),
        "drop": (0.0, 0.03),
        "lose": (0.0, 0.03),
        "late": (0.0, 0.01, 0.03),
        "stale": (0.0, 0.1),
        "garble": (0.0, 0.03),
        "rot": (0.0, 0.02, 0.06),
        "decay": (0.0, 0.0, 0.01),
        "slow": (0.0, 0.03),
    }
    chances = {name: rng.choice(values) for name, values in chosen.items()}
    drains, kills = rng.choice([0.0, 0.02]), rng.choice([2, 6, 15])
    chances["record"] = rng.choice((0.0, 0.0, 0.01))
    denied_from_s = rng.uniform(0, 100)
    denied_for_s = rng.choice((0.0, 0.0, 15.0, 30.0))
    return Scenario(
        settings=settings,
        replicas=replicas,
        spares=1 if fixed else 0,
        syncer=plan == "syncer",
        large_shards=total_rounds % 3 > 0,  # without a draw, too
        chances=Chances(**chances),
        drains=drains,
        kills=kills,
        denied_s=(denied_from_s, denied_from_s + denied_for_s),
    )


def run_seed(seed: int) -> Outcome:
    """Run a seed; deterministic."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    scenario = make_scenario(rng)
    harness = Harness(scenario, rng)
    failure = ""
    with virtual(harness):
        try:
            harness.run()
        except Hang as hang:
            if _is_beyond_repair(harness):
                harness.counts["runs that damage stopped"] += 1
                return _outcome(seed, scenario, harness, "")
            failure = f"hang: {hang}{_where(harness)}"
    failure = failure or _bad_ends(harness)
    if not failure:
        try:
            _check_with_oracle(harness)
        except oracle.Violation as violation:
            failure = f"violation: {violation}"
    return _outcome(seed, scenario, harness, failure)


def _check_with_oracle(harness: Harness) -> None:
    bucket = harness.bucket
    log = oracle.check(
        bucket.objects,
        bucket.written,
        bucket.written_s,
        harness.settings.to_dict(),
        swept_s=harness.swept_s,
        list_lag_s=LIST_LAG_S if harness.scenario.chances.stale else 0.0,
        damaged=bucket.ever_damaged,
    )
    records = [key for key in bucket.written if keys.parse_contribution_record(key)]
    harness.counts["packs"] += sum(key.startswith(keys.PACKS) for key in bucket.objects)
    harness.counts["records deleted"] += sum(key not in bucket.objects for key in records)
    harness.counts["objects after the last sweep"] += sum(
        when_s >= harness.swept_s
        for key, when_s in bucket.written_s.items()
        if key in bucket.objects and key.startswith("rounds/") and not key.endswith(".json")
    )
    if _keeps_all_steps(harness):
        settings = harness.settings
        tail = 2 * settings.sync_every + settings.overlap_steps
        for life in harness.lives:
            if life.reason == "completed" and life.steps and life.group is not None:
                if life.group._loop.progress._discarded_steps > 0:
                    # It was so late that a round it needed had been swept.
                    harness.counts["processes that reloaded a checkpoint"] += 1
                    continue
                identity = life.group.identity
                who = (identity.replica, identity.incarnation)
                log.check_lost(life.steps, who, tail=tail)
                harness.counts["processes with no step lost"] += 1


def _keeps_all_steps(harness: Harness) -> bool:
    """Return whether the scenario never makes a replica drop steps: late contributions are kept,
    and no round has to be skipped because it is unreadable."""
    settings, chances = harness.settings, harness.scenario.chances
    damages = chances.rot or chances.decay or chances.record or chances.garble
    mixes = settings.overlap_steps > 0 and settings.mixing_alpha < 1
    return not (damages or mixes or settings.quarantine_rounds or not keeps_late_work(settings))


def _is_beyond_repair(harness: Harness) -> bool:
    """Return whether a replica ended with an error that names a permanently damaged object, while
    no replica that had applied its round was alive after the faults had stopped."""
    calm_s = harness.calm_from_s if harness.calm_from_s is not None else float("inf")
    helpers = [
        life.group._loop.state.round
        for life in harness.lives
        if life.group is not None
        and life.group._loop.state.weights is not None
        and not life.process.dead
        and life.ended_s > calm_s
    ]
    for key in harness.bucket.damaged:
        match = re.match(r"(?:rounds|checkpoints)/(\d{8})/", key)
        named = any(life.error is not None and key in str(life.error) for life in harness.lives)
        if match and named and max(helpers, default=0) <= int(match[1]):
            return True
    return False


def _outcome(seed: int, scenario: Scenario, harness: Harness, failure: str) -> Outcome:
    return Outcome(
        seed=seed,
        scenario=scenario,
        failure=failure,
        counts=harness.counts,
        processes=len(harness.lives),
        rounds=harness.committed(),
        virtual_s=harness.scheduler.now_s - 1000.0,
    )


def _bad_ends(harness: Harness) -> str:
    """Return errors without a matching fault: crashes, and failures after the faults have
    stopped."""
    for life in harness.lives:
        error = life.error
        if error is not None and not _is_expected(harness, life, error):
            return f"replica {life.replica} ended: {type(error).__name__}: {error}"
    return ""


def _is_expected(harness: Harness, life: Life, error: BaseException) -> bool:
    if isinstance(error, FencedOut):
        return any(
            later.replica == life.replica and life.started_s < later.started_s < life.ended_s
            for later in harness.lives
        )
    if isinstance(
        error, StoreDenied
    ):  # of an operation that this process had not been permitted before
        return life.group is None and harness.denied_between(life.started_s, life.ended_s)
    if isinstance(error, RoundTimeout):  # too few replicas were live
        return harness.calm_from_s is None or life.ended_s < harness.calm_from_s + QUORUM_S
    if isinstance(error, ReplicaError):
        return any(key in str(error) for key in harness.bucket.ever_damaged)
    return False


def _where(harness: Harness) -> str:
    newest = {life.replica: life for life in harness.lives}
    lines = [
        f"replica {r}: {'dead' if life.process.dead else life.reason or life.error or 'runs'}"
        f" at round {life.group.round if life.group else None}"
        f" ({life.group._lease.progress if life.group else ''})"
        for r, life in newest.items()
    ]
    return "\n  " + "\n  ".join([*lines, f"damaged: {harness.bucket.damaged}"])
