"""What is compared: one :class:`Arm` for each row of the table, as plain data.

Every arm but ``single_quarter`` trains on the same number of tokens, :data:`TOKENS`. DiLoCo's are
``REPLICAS x ROUNDS x H x batch x context``; the single worker takes four times the steps, data
parallel four times the batch, and the arms whose membership changes take more rounds with fewer
replicas. Settings that an arm does not name have the defaults of ``diloco``: it inherits the
learning rates.

Left out: training (:mod:`bench.experiments.training`) and keeping results.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.protocol.round_weights import HUNG_AFTER
from diloco.protocol.settings import GroupSettings

REPLICAS = 4
ROUNDS = 40
H = 32
BATCH = 8
CONTEXT = 64
TOKENS = REPLICAS * ROUNDS * H * BATCH * CONTEXT
PLAIN_CHUNK = 64
"""Steps that a plain loop counts as a round; nothing depends on it."""
EVALUATIONS = 4
"""Held-out evaluations of a run, evenly spread; the last is the result."""

INNER_LR = 4e-3
DATA_PARALLEL_LR = 8e-3
OUTER_LR = 1.0
OUTER_MOMENTUM = 0.7

PLAIN, GROUP = "plain", "group"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One row. ``kind`` plain is an ordinary loop in one process, group is the library's round loop
    with one thread per replica.

    ``members`` is the number of replicas in each round, in order. ``drop`` is the probability that
    a replica's contribution to a round is lost; ``drops`` has that of each replica instead.
    ``outage`` is a replica, and the first and last round of those that lose its contribution. With
    ``cut_off`` its heartbeats of these rounds are lost too, so the others count it as dead from the
    second of them on.
    ``settings`` go into :class:`GroupSettings`. A ``retired`` arm has results of an earlier version
    of the library, which this one cannot repeat.
    """

    name: str
    title: str
    kind: str = GROUP
    members: tuple[int, ...] = (REPLICAS,) * ROUNDS
    steps_per_round: int = H
    fragments: int = 1
    drop: float = 0.0
    drops: tuple[float, ...] = ()
    outage: tuple[int, int, int] | None = None
    cut_off: bool = False
    retired: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loses(self) -> bool:
        """Whether contributions are lost."""
        return bool(self.drop or self.drops or self.outage)

    @property
    def late_keep(self) -> float:
        return float(self.settings.get("late_keep", GroupSettings().late_keep))

    @property
    def batch_size(self) -> int:
        return int(self.settings.get("batch_size", BATCH))

    @property
    def total_steps(self) -> int:
        """Inner steps of the longest-lived replica: the length of the learning-rate schedule."""
        return len(self.members) * self.steps_per_round

    @property
    def tokens(self) -> int:
        return sum(self.members) * self.steps_per_round * self.batch_size * CONTEXT

    def group_settings(self, seed: int) -> dict[str, Any]:
        """Values for :class:`GroupSettings`, complete but for its defaults.

        No clock may decide anything here: the quorum is all replicas, or, where that is impossible,
        the grace window is endless.
        """
        all_replicas = min(self.members) == max(self.members) and not self.loses
        rounds = len(self.members)
        return {
            "sync_every": self.steps_per_round * self.fragments,
            "total_rounds": rounds,
            "outer_lr": OUTER_LR,
            "outer_momentum": OUTER_MOMENTUM,
            "inner_lr": INNER_LR,
            "warmup_steps": self.total_steps // 20,
            "batch_size": BATCH,
            "seed": seed,
            "num_replicas": self.members[0],
            "max_replicas": max(self.members),
            "min_quorum": self.members[0] if all_replicas else 1,
            "grace_s": 80_000.0,
            "heartbeat_timeout_s": 60.0 if self.cut_off else 3600.0,
            "start_wait_s": 80_000.0,
            "round_timeout_s": 80_000.0,
            "eval_every": rounds // EVALUATIONS,
            "checkpoint_every": 5 * self.fragments,
            **({"num_fragments": self.fragments} if self.fragments > 1 else {}),
            **self.settings,
        }

    def definition(self, seed: int) -> dict[str, Any]:
        """All that decides the result: a stored result counts only while this is unchanged."""
        body = dataclasses.asdict(self) | {"settings": self.group_settings(seed)}
        body.pop("title")
        body.pop("retired")
        if self.fragments == 1:
            body.pop("fragments")
        for name in ("drops", "outage", "cut_off"):
            if not body[name]:
                body.pop(name)
        for name in body.keys() & {"drops", "outage"}:
            body[name] = list(body[name])
        return body | {"members": list(self.members), "seed": seed}


def _steps(steps: int, **settings: Any) -> dict[str, Any]:
    """An ordinary loop of ``steps``."""
    rounds = (1,) * (steps // PLAIN_CHUNK)
    return {
        "kind": PLAIN,
        "members": rounds,
        "steps_per_round": PLAIN_CHUNK,
        "settings": settings,
    }


def _fragments(count: int, **settings: Any) -> dict[str, Any]:
    """``count`` times as many rounds, each of one fragment and that much shorter."""
    return {
        "fragments": count,
        "members": (REPLICAS,) * (ROUNDS * count),
        "steps_per_round": H // count,
        "settings": settings,
    }


def _every(h: int) -> dict[str, Any]:
    """Another number of local steps between exchanges."""
    return {"members": (REPLICAS,) * (ROUNDS * H // h), "steps_per_round": h}


def _ramp(*counts: int) -> tuple[int, ...]:
    """As many rounds with each number of replicas as take the same tokens in all."""
    rounds, rest = divmod(REPLICAS * ROUNDS, sum(counts))
    assert rest == 0, counts
    return tuple(count for count in counts for _ in range(rounds))


_T = ROUNDS * H
_TOPK = {"codec": "topk", "topk": 64, "error_feedback": 0.95}

CORE: tuple[Arm, ...] = (
    Arm(name="single", title="single worker, 4 x steps", **_steps(4 * _T)),
    Arm(
        name="data_parallel",
        title="data parallel, 4 x batch",
        **_steps(_T, batch_size=4 * BATCH, inner_lr=DATA_PARALLEL_LR),
    ),
    Arm(name="diloco", title="DiLoCo, k = 4"),
)

VARIANTS: tuple[Arm, ...] = (
    Arm(name="ramp_up", title="1 -> 4 replicas", members=_ramp(1, 2, 3, 4)),
    Arm(name="ramp_down", title="4 -> 1 replicas", members=_ramp(4, 3, 2, 1)),
    Arm(name="int8", title="int8", settings={"codec": "int8"}),
    Arm(name="e3m0", title="E3M0, 4 bits", settings={"codec": "e3m0"}),
    Arm(
        name="topk",
        title="top-k 64 of 4,096, error feedback 0.95",
        settings=_TOPK,
    ),
    Arm(name="fragments", title="2 fragments, no overlap", **_fragments(2)),
    Arm(
        name="streaming",
        title="streaming: 2 fragments, overlap 4 steps, alpha 0.5",
        **_fragments(2, overlap_steps=4, mixing_alpha=0.5),
    ),
    Arm(
        name="topk_plain",
        title="top-k as above, outer SGD 1.0 without momentum",
        settings=_TOPK | {"outer_lr": 1.0, "outer_momentum": 0.0},
    ),
    Arm(name="bf16", title="bf16", settings={"codec": "bf16"}),
    Arm(name="muon", title="Muon for hidden matrices", settings={"inner_optimizer": "muon"}),
    Arm(
        name="int8_mean8",
        title="int8, sharded, mean in 8 bits",
        settings={"codec": "int8", "mean_codec": "int8", "reduce_plan": "sharded"},
    ),
    Arm(
        name="e3m0_mean4",
        title="E3M0, sharded, mean in 4 bits",
        settings={"codec": "e3m0", "mean_codec": "e3m0", "reduce_plan": "sharded"},
    ),
    Arm(
        name="narrow_state",
        title="master weights and outer momentum in bf16",
        settings={"master_dtype": "bf16", "momentum_dtype": "bf16"},
    ),
    Arm(name="h8", title="DiLoCo, H = 8", **_every(8)),
    Arm(name="h128", title="DiLoCo, H = 128", **_every(128)),
    Arm(name="k2", title="DiLoCo, k = 2, 2 x steps", members=(2,) * (2 * ROUNDS)),
    Arm(name="k8", title="DiLoCo, k = 8, half the steps", members=(8,) * (ROUNDS // 2)),
    Arm(name="single_quarter", title="single worker, same steps, 1/4 of the tokens", **_steps(_T)),
)


def _keeps(keep: float, **settings: Any) -> dict[str, Any]:
    return {"late_keep": keep} | settings


OUTAGE = (3, 13, 20)
SPEEDS = (0.1, 0.3, 0.7, 0.9)
"""Losses that go with speed: the slower a replica, the more of its contributions are late."""

RETIRED: tuple[Arm, ...] = (
    Arm(name="dropped_30", title="30 % dropped, mean of those present", drop=0.3, retired=True),
    Arm(name="dropped_50", title="50 % dropped, mean of those present", drop=0.5, retired=True),
    Arm(
        name="dropped_50_overwrite",
        title="50 % dropped, mean of those present, late work is overwritten",
        drop=0.5,
        settings={"late_policy": "overwrite"},
        retired=True,
    ),
    Arm(
        name="dropped_50_half",
        title="50 % dropped, mean of those present, outer learning rate halved",
        drop=0.5,
        settings={"outer_lr": OUTER_LR / 2},
        retired=True,
    ),
    Arm(name="dropped_70", title="70 % dropped, mean of those present", drop=0.7, retired=True),
    Arm(
        name="dropped_outage",
        title="outage of one replica, 8 of 40 rounds, mean of those present",
        outage=OUTAGE,
        retired=True,
    ),
    Arm(
        name="dropped_speed",
        title="10, 30, 70, 90 % of a replica's dropped, mean of those present",
        drops=SPEEDS,
        retired=True,
    ),
)
"""Late work before protocol 3: a mean over the contributors present."""


LATE: tuple[Arm, ...] = (
    *(
        Arm(
            name=f"late_{percent}_keep_{keep:g}",
            title=f"{percent} % dropped, keep {keep:g}",
            drop=percent / 100,
            settings=_keeps(keep),
        )
        for keep in (0.5, 0.7, 1.0, 0.0)
        for percent in (50, 30)
    ),
    *(
        Arm(
            name=f"late_outage_keep_{keep:g}",
            title=f"outage of one replica, 8 of 40 rounds, keep {keep:g}",
            outage=OUTAGE,
            settings=_keeps(keep),
        )
        for keep in (0.5, 1.0, 0.0)
    ),
    *(
        Arm(
            name=f"late_outage_{rounds}_keep_0.5",
            title=f"outage of one replica, {rounds} of 40 rounds, keep 0.5",
            outage=(OUTAGE[0], first, first + rounds - 1),
            settings=_keeps(0.5),
        )
        for first, rounds in ((13, 3), (11, 20))
    ),
    Arm(
        name="late_cut_off_keep_0.5",
        title="outage of one replica that is counted as dead, 8 of 40 rounds, keep 0.5",
        outage=OUTAGE,
        cut_off=True,
        settings=_keeps(0.5),
    ),
    *(
        Arm(
            name=f"late_speed_keep_{keep:g}",
            title=f"10, 30, 70, 90 % of a replica's dropped, keep {keep:g}",
            drops=SPEEDS,
            settings=_keeps(keep),
        )
        for keep in (0.5, 1.0, 0.0)
    ),
    *(
        Arm(
            name=f"late_70_keep_{keep:g}",
            title=f"70 % dropped, keep {keep:g}",
            drop=0.7,
            settings=_keeps(keep),
        )
        for keep in (0.5, 1.0)
    ),
    Arm(
        name="late_50_k8",
        title="50 % dropped, k = 8, half the steps, keep 0.5",
        members=(8,) * (ROUNDS // 2),
        drop=0.5,
        settings=_keeps(0.5),
    ),
    Arm(
        name="late_50_topk",
        title="50 % dropped, top-k as above, keep 0.5",
        drop=0.5,
        settings=_keeps(0.5, **_TOPK),
    ),
    Arm(
        name="late_50_tokens",
        title="50 % dropped, token weights, keep 0.5",
        drop=0.5,
        settings=_keeps(0.5, weighting="tokens"),
    ),
    Arm(
        name="late_50_streaming",
        title="50 % dropped, streaming as above, keep 0.5",
        drop=0.5,
        **_fragments(2, overlap_steps=4, mixing_alpha=0.5, late_keep=0.5),
    ),
)


def _earlier_rule(arm: Arm, rule: str) -> Arm:
    """The retired arm with the results of ``arm`` by an earlier rule for late work."""
    name = arm.name.replace("late_", f"{rule.replace(' ', '_')}_", 1)
    return dataclasses.replace(arm, name=name, title=f"{arm.title}, {rule}", retired=True)


WHOLE_PROGRESS: tuple[Arm, ...] = tuple(
    _earlier_rule(arm, "whole progress")
    for arm in LATE
    if arm.late_keep > 0 and (arm.outage is None or arm.outage[2] - arm.outage[1] >= HUNG_AFTER)
)
"""Late work when a replica kept a share of all of its progress, also in the first round that it
missed; now it drops the component along the round's mean. A replica that is away keeps all by both
rules."""

WHOLE_ROOM: tuple[Arm, ...] = tuple(
    _earlier_rule(arm, "whole room")
    for arm in LATE
    if 0 < arm.late_keep < 1 and not arm.cut_off and arm.outage in (None, OUTAGE)
)
"""Late work when each of eight missed rounds left the room of a whole replica; now the room shrinks
with the missed rounds."""

ALWAYS_ROOM: tuple[Arm, ...] = tuple(
    _earlier_rule(arm, "always room") for arm in LATE if arm.outage and arm.late_keep == 0.5
)
"""Outages when the weights left room for every late replica; now a replica that becomes late in a
steady group gets none."""


def tuning() -> tuple[Arm, ...]:
    """Learning rates, on one seed: first the inner one, then the outer pair on top of it."""
    arms = [
        Arm(name=f"tune single lr={lr:g}", title="", **_steps(4 * _T, inner_lr=lr))
        for lr in (2e-3, 4e-3, 8e-3, 16e-3)
    ]
    arms += [
        Arm(
            name=f"tune data_parallel lr={lr:g}",
            title="",
            **_steps(_T, batch_size=4 * BATCH, inner_lr=lr),
        )
        for lr in (4e-3, 8e-3, 16e-3)
    ]
    pairs = [(0.7, 0.9), (0.4, 0.9), (0.7, 0.7), (1.0, 0.8), (1.0, 0.7), (1.0, 0.5), (1.0, 0.0)]
    arms += [
        Arm(
            name=f"tune diloco lr={lr:g} momentum={momentum:g}",
            title="",
            settings={"outer_lr": lr, "outer_momentum": momentum},
        )
        for lr, momentum in pairs
    ]
    arms += [
        Arm(name=f"tune diloco inner={lr:g}", title="", settings={"inner_lr": lr})
        for lr in (2e-3, 8e-3)
    ]
    return tuple(arms)


def all_arms() -> tuple[Arm, ...]:
    return CORE + VARIANTS + RETIRED + LATE + WHOLE_PROGRESS + ALWAYS_ROOM + WHOLE_ROOM


def dropped(arm: Arm, *, round: int, seed: int) -> frozenset[int]:
    """Whose contribution to ``round`` is lost: each with its probability, on its own.

    A draw that loses all of them is repeated, because a round without contributions is no round.
    """
    replicas = arm.members[round - 1]
    if arm.outage is not None:
        replica, first, last = arm.outage
        return frozenset({replica} if first <= round <= last else ())
    chances = arm.drops or (arm.drop,) * replicas
    rng = random.Random(f"dropped {seed} {round}")
    while True:
        lost = frozenset(r for r in range(replicas) if rng.random() < chances[r])
        if len(lost) < replicas:
            return lost
