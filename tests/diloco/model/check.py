"""One seed: make up a scenario, run it, and let the oracle judge."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import torch

from diloco.errors import FencedOut, ReplicaError
from diloco.rendezvous.settings import GroupSettings
from diloco.rendezvous.store import StoreError
from tests.diloco.model import oracle
from tests.diloco.model.faulty_bucket import Chances
from tests.diloco.model.virtual_time import Hang
from tests.diloco.model.world import Scenario, World, virtual


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one seed; ``failure`` is '' if nothing is wrong."""

    seed: int
    scenario: Scenario
    failure: str
    counts: Counter[str]
    processes: int
    rounds: int
    virtual_s: float


def make_scenario(rng: random.Random) -> Scenario:
    """Settings and faults; everything that the seed decides before the run begins."""
    replicas = rng.randint(2, 4)
    plan = rng.choice(["gather", "sharded", "syncer"])
    fragments, sync_every, overlap = rng.choice(
        [(1, 3, 0), (1, 3, 0), (1, 4, 2), (2, 4, 0), (2, 4, 1), (2, 4, 3), (4, 8, 3)]
    )
    fixed = rng.random() < 0.15
    settings = GroupSettings(
        sync_every=sync_every,
        num_fragments=fragments,
        overlap_steps=overlap,
        mixing_alpha=rng.choice([0.5, 1.0]),
        total_rounds=rng.randint(6, 14),
        num_replicas=replicas,
        min_quorum=replicas if fixed else rng.randint(1, replicas),
        world_size_mode="fixed_with_spares" if fixed else "dynamic",
        reduce_plan=plan,
        codec=rng.choice(["fp32", "fp32", "bf16", "int8"]),
        late_policy=rng.choice(["rebase", "rebase", "overwrite"]),
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
    return Scenario(
        settings=settings,
        replicas=replicas,
        spares=1 if fixed else 0,
        syncer=plan == "syncer",
        chances=Chances(**{name: rng.choice(values) for name, values in chosen.items()}),
        drains=rng.choice([0.0, 0.02]),
        kills=rng.choice([2, 6, 15]),
    )


def run_seed(seed: int) -> Outcome:
    """Deterministic: the same seed makes the same run."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    scenario = make_scenario(rng)
    world = World(scenario, rng)
    failure = ""
    with virtual(world):
        try:
            world.run()
        except Hang as hang:
            if _names_damage(world):
                world.counts["stopped by damage that an error names"] += 1
                return _outcome(seed, scenario, world, "")
            failure = f"hang: {hang}{_where(world)}"
    failure = failure or _bad_ends(world)
    if not failure:
        try:
            bucket = world.bucket
            oracle.check(bucket.objects, bucket.written, bucket.written_s, world.settings.to_dict())
        except oracle.Violation as violation:
            failure = f"violation: {violation}"
    return _outcome(seed, scenario, world, failure)


def _names_damage(world: World) -> bool:
    """Whether a replica ended with an error that names an object which is damaged for good: every
    replica that had applied the round is dead, and no checkpoint holds it."""
    errors = [str(life.error) for life in world.lives if life.error is not None]
    return any(key in error for key in world.bucket.damaged for error in errors)


def _outcome(seed: int, scenario: Scenario, world: World, failure: str) -> Outcome:
    return Outcome(
        seed=seed,
        scenario=scenario,
        failure=failure,
        counts=world.counts,
        processes=len(world.lives),
        rounds=world.committed(),
        virtual_s=world.scheduler.now_s - 1000.0,
    )


def _bad_ends(world: World) -> str:
    """Errors that are no answer to what went wrong: crashes, and any failure in calm times."""
    for life in world.lives:
        error = life.error
        expected = isinstance(error, StoreError | FencedOut | ReplicaError)
        if error is not None and not expected:
            return f"replica {life.replica} crashed: {type(error).__name__}: {error}"
    return ""


def _where(world: World) -> str:
    newest = {life.replica: life for life in world.lives}
    lines = [
        f"replica {r}: {'dead' if life.process.dead else life.reason or life.error or 'runs'}"
        f" at round {life.group.round if life.group else None}"
        f" ({life.group._lease.progress if life.group else ''})"
        for r, life in newest.items()
    ]
    return "\n  " + "\n  ".join([*lines, f"damaged: {world.bucket.damaged}"])
