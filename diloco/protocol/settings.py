"""Group settings: one frozen schema that everybody reads and nobody overrides.

The submit form, the settings tab and ``group.json`` (:mod:`diloco.protocol.group_document`) are all
made from :class:`GroupSettings`; :func:`setting_fields` gives label, help, unit and bounds of each
field to whoever renders it.

Errors: :class:`SettingsError` names the field, what was expected and what was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol.setting_spec import (
    SettingsError,
    SettingSpec,
    choice_setting,
    float_setting,
    int_setting,
    plain,
)

__all__ = ["SECTIONS", "GroupSettings", "SettingSpec", "SettingsError", "setting_fields"]

SECTIONS = {
    "rounds": "Rounds and synchronisation",
    "exchange": "Exchange through the store",
    "outer": "Merge and outer optimizer",
    "inner": "Inner optimizer",
    "membership": "Membership and liveness",
    "saving": "Evaluation and checkpoints",
}


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Every group setting. Constructing one validates it; defaults follow the DiLoCo paper
    (arXiv:2311.08105) where a small run allows."""

    sync_every: int = int_setting(
        50,
        "Local steps (H)",
        "Inner optimizer steps each replica takes between two exchanges of the same weights.",
        "rounds",
        minimum=1,
        maximum=100_000,
        unit="steps",
    )
    total_rounds: int = int_setting(
        20, "Rounds", "The run has succeeded when this many rounds have been committed.",
        "rounds", minimum=1, maximum=1_000_000, unit="rounds",
    )  # fmt: skip
    max_tokens: int = int_setting(
        0,
        "Token limit",
        "Stop after the round in which this many tokens were trained on. 0 means no limit.",
        "rounds",
        minimum=0,
        unit="tokens",
        zero="no limit",
    )
    dylu: str = choice_setting(
        "off", "Dynamic local updates",
        "on: a replica of speed v takes max(1, floor(v / max v x H)) steps, so that fast and slow "
        "ones arrive together (arXiv:2401.09135).",
        "rounds", choices=("off", "on"),
    )  # fmt: skip
    num_fragments: int = int_setting(
        1, "Fragments (P)",
        "The weights are cut into this many pieces that are exchanged in turn, one every H / P "
        "steps, so that the bandwidth needed at once is P times smaller (arXiv:2501.18512).",
        "rounds", minimum=1, maximum=1024, unit="fragments",
    )  # fmt: skip
    fragment_pattern: str = choice_setting(
        "strided", "Fragment pattern",
        "strided: every P-th layer; sequential: neighbouring layers; size: neighbouring tensors "
        "of about equal bytes.",
        "rounds", choices=("strided", "sequential", "size"),
    )  # fmt: skip
    overlap_steps: int = int_setting(
        0, "Overlap (tau)",
        "The exchange runs in the background of this many inner steps. 0: replicas wait for it.",
        "rounds", minimum=0, maximum=100_000, unit="steps", zero="none",
    )  # fmt: skip
    mixing_alpha: float = float_setting(
        0.5, "Mixing (alpha)",
        "With overlap: how much of the steps made during the exchange is kept, on top of the new "
        "global weights. 0: none, 1: all.",
        "rounds", minimum=0.0, maximum=1.0, zero="none kept",
    )  # fmt: skip
    codec: str = choice_setting(
        "fp32", "Payload codec",
        "How pseudo-gradients are encoded on their way through the store; sums are always fp32.",
        "exchange", choices=("fp32", "bf16", "int8", "e3m0", "topk"),
    )  # fmt: skip
    topk: int = int_setting(
        64, "Top-k",
        "Values kept of each 4,096, for the top-k codec (SparseLoCo, arXiv:2508.15706).",
        "exchange", minimum=1, maximum=4096, unit="values",
    )  # fmt: skip
    error_feedback: float = float_setting(
        0.95, "Error feedback",
        "Decay of what top-k left out when it is added to the next contribution. 0: dropped.",
        "exchange", minimum=0.0, maximum=1.0, zero="dropped",
    )  # fmt: skip
    reduce_plan: str = choice_setting(
        "auto", "Reduce plan",
        "gather: everyone reads everyone. sharded: each contributor reduces a slice for all. "
        "syncer: a process in the bucket's region reduces everything. auto: the fastest of them.",
        "exchange", choices=("auto", "gather", "sharded", "syncer"),
    )  # fmt: skip
    outer_lr: float = float_setting(
        0.7, "Outer learning rate", "Step size of Nesterov SGD on the averaged pseudo-gradient.",
        "outer", minimum=0.0, maximum=10.0,
    )  # fmt: skip
    outer_momentum: float = float_setting(
        0.9, "Outer momentum", "Nesterov momentum of the outer optimizer.",
        "outer", minimum=0.0, maximum=0.9999,
    )  # fmt: skip
    weighting: str = choice_setting(
        "uniform",
        "Contribution weights",
        "uniform: every contributor counts the same. tokens: weight = tokens x tokens / steps "
        "(Decoupled DiLoCo).",
        "outer",
        choices=("uniform", "tokens"),
    )
    merge: str = choice_setting(
        "mean", "Merge",
        "mean: weighted mean. rda: direction and length averaged apart, per tensor; embeddings "
        "by mean (Decoupled DiLoCo, arXiv:2604.21428).",
        "outer", choices=("mean", "rda"),
    )  # fmt: skip
    late_policy: str = choice_setting(
        "rebase", "Late work",
        "rebase: a replica that missed a round keeps its progress on top of the new weights. "
        "overwrite: it takes the new weights and drops its progress.",
        "outer", choices=("rebase", "overwrite"),
    )  # fmt: skip
    outlier_z: float = float_setting(
        0.0, "Outlier limit",
        "Refuse a contribution whose norm lies this many robust standard deviations above the "
        "round's median (with four or more contributions). 0: never.",
        "outer", minimum=0.0, maximum=1000.0, zero="never",
    )  # fmt: skip
    inner_lr: float = float_setting(
        4e-4, "Inner learning rate", "Peak learning rate of AdamW.",
        "inner", minimum=0.0, maximum=10.0,
    )  # fmt: skip
    warmup_steps: int = int_setting(
        100, "Warm-up", "Inner steps until the peak learning rate, then cosine decay.",
        "inner", minimum=0, unit="steps",
    )  # fmt: skip
    min_lr_ratio: float = float_setting(
        0.1, "Final learning rate", "Where the cosine ends, as a fraction of the peak.",
        "inner", minimum=0.0, maximum=1.0,
    )  # fmt: skip
    weight_decay: float = float_setting(
        0.1, "Weight decay", "Decoupled weight decay of AdamW, on matrices only.",
        "inner", minimum=0.0, maximum=10.0,
    )  # fmt: skip
    grad_clip: float = float_setting(
        1.0, "Gradient clip", "Global norm the inner gradient is clipped to. 0 means no clipping.",
        "inner", minimum=0.0, zero="none",
    )  # fmt: skip
    batch_size: int = int_setting(
        8, "Batch size", "Sequences per inner step and replica.",
        "inner", minimum=1, maximum=65_536, unit="sequences",
    )  # fmt: skip
    seed: int = int_setting(
        0, "Seed", "Of the initial weights and of the order of the data.",
        "inner", minimum=0, maximum=2**31 - 1,
    )  # fmt: skip
    num_replicas: int = int_setting(
        4, "Target replicas", "How many replicas the run wants. Pools must add up to it.",
        "membership", minimum=1, maximum=1024, unit="replicas",
    )  # fmt: skip
    max_replicas: int = int_setting(
        16,
        "Data shards",
        "The training data is cut into this many shards, one per replica number. Fixed for the "
        "life of the run, so that replicas can come and go.",
        "membership",
        minimum=1,
        maximum=99_999,
        unit="shards",
    )
    world_size_mode: str = choice_setting(
        "dynamic", "World size",
        "dynamic: the mean is over whoever contributed. fixed_with_spares: every round is made of "
        "exactly the target number of replicas; more of them are spares that follow.",
        "membership", choices=("dynamic", "fixed_with_spares"),
    )  # fmt: skip
    min_quorum: int = int_setting(
        1, "Minimum quorum",
        "A round is not closed with fewer contributors than this; below it the run waits.",
        "membership", minimum=1, maximum=1024, unit="replicas",
    )  # fmt: skip
    start_wait_s: float = float_setting(
        120.0,
        "Wait at the start",
        "Before round 1, wait at most this long for all target replicas.",
        "membership",
        minimum=0.0,
        maximum=86_400.0,
        unit="s",
    )
    start_replicas: int = int_setting(
        0, "Start together",
        "No replica takes the first step of the run before this many are there and ready, however "
        "long that takes. 0: they start after the wait above, with whoever came.",
        "membership", minimum=0, maximum=1024, unit="replicas", zero="whoever came",
    )  # fmt: skip
    grace_s: float = float_setting(
        60.0,
        "Grace window",
        "Once the quorum has contributed, wait at most this long for live replicas that have not.",
        "membership",
        minimum=0.0,
        maximum=86_400.0,
        unit="s",
    )
    grace_gamma: float = float_setting(
        0.0, "Adaptive grace",
        "Above 0, the window is this share of the time that overlap leaves: gamma x (tau x step - "
        "time to quorum - time to sync), at most the grace window. 0: always the whole window.",
        "membership", minimum=0.0, maximum=10.0, zero="off",
    )  # fmt: skip
    grace_floor_s: float = float_setting(
        1.0, "Shortest grace",
        "The adaptive window is never shorter, so that slow replicas are not starved.",
        "membership", minimum=0.0, maximum=86_400.0, unit="s",
    )  # fmt: skip
    quarantine_rounds: int = int_setting(
        0, "Quarantine",
        "A replica's first rounds in a running group do not count while seasoned replicas are "
        "there: its inner optimizer is still cold.",
        "membership", minimum=0, maximum=10_000, unit="rounds", zero="none",
    )  # fmt: skip
    heartbeat_timeout_s: float = float_setting(
        15.0,
        "Heartbeat timeout",
        "A replica whose lease has not changed for this long counts as dead.",
        "membership",
        minimum=1.0,
        maximum=3600.0,
        unit="s",
    )
    round_timeout_s: float = float_setting(
        900.0,
        "Round timeout",
        "A replica that waits longer than this for one exchange gives up with an error.",
        "membership",
        minimum=1.0,
        maximum=86_400.0,
        unit="s",
    )
    eval_every: int = int_setting(
        1, "Evaluate every", "Rounds between evaluations of the global weights. 0 means never.",
        "saving", minimum=0, unit="rounds", zero="never",
    )  # fmt: skip
    checkpoint_every: int = int_setting(
        5, "Checkpoint every", "Rounds between checkpoints of the global weights.",
        "saving", minimum=1, unit="rounds",
    )  # fmt: skip

    state_every: int = int_setting(
        5, "Save replica state every",
        "Rounds between saves of each replica's inner optimizer, residual and data position, for "
        "a relaunch under the same number. 0 means only when it leaves.",
        "saving", minimum=0, unit="rounds", zero="only when leaving",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for spec in setting_fields():
            object.__setattr__(self, spec.name, spec.check(getattr(self, spec.name)))
        self._check_rounds()
        self._check_membership()

    def _check_rounds(self) -> None:
        if self.sync_every % self.num_fragments:
            raise SettingsError(
                "num_fragments",
                f"expected a divisor of the {self.sync_every} local steps, so that every round "
                f"is as long, found {self.num_fragments}",
            )
        if self.overlap_steps >= self.sync_every:
            raise SettingsError(
                "overlap_steps",
                f"expected less than the {self.sync_every} local steps: a fragment's exchange "
                f"must end before its next one begins, found {self.overlap_steps}",
            )
        if self.warmup_steps > self.total_steps:
            raise SettingsError(
                "warmup_steps",
                f"expected at most the {self.total_steps} inner steps of the whole run "
                f"(rounds x H / P), found {self.warmup_steps}",
            )
        if self.dylu == "on" and self.overlap_steps >= self.round_steps:
            raise SettingsError(
                "overlap_steps",
                f"expected less than the {self.round_steps} steps of a round, because dynamic "
                f"local updates shorten rounds, found {self.overlap_steps}",
            )

    def _check_membership(self) -> None:
        if self.min_quorum > self.num_replicas:
            raise SettingsError(
                "min_quorum",
                f"expected at most the target of {self.num_replicas} replicas, "
                f"found {self.min_quorum}",
            )
        if self.start_replicas > self.num_replicas:
            raise SettingsError(
                "start_replicas",
                f"expected at most the target of {self.num_replicas} replicas, "
                f"found {self.start_replicas}",
            )
        if self.max_replicas < self.num_replicas:
            raise SettingsError(
                "max_replicas",
                f"expected at least the target of {self.num_replicas} replicas, "
                f"found {self.max_replicas}",
            )
        if self.world_size_mode == "fixed_with_spares" and self.min_quorum != self.num_replicas:
            raise SettingsError(
                "min_quorum",
                f"expected the target of {self.num_replicas} replicas, because the world size "
                f"is fixed, found {self.min_quorum}",
            )
        if self.grace_gamma > 0 and not self.overlap_steps:
            raise SettingsError(
                "grace_gamma",
                "expected 0 without overlap, because the adaptive window is what overlap leaves, "
                f"found {plain(self.grace_gamma)}",
            )
        if self.grace_floor_s > self.grace_s and self.grace_gamma > 0:
            raise SettingsError(
                "grace_floor_s",
                f"expected at most the grace window of {plain(self.grace_s)} s, "
                f"found {plain(self.grace_floor_s)}",
            )
        if self.round_timeout_s <= self.heartbeat_timeout_s:
            raise SettingsError(
                "round_timeout_s",
                f"expected more than the heartbeat timeout of {plain(self.heartbeat_timeout_s)} "
                f"s, found {plain(self.round_timeout_s)}",
            )
        if self.round_timeout_s < self.grace_s:
            raise SettingsError(
                "round_timeout_s",
                f"expected at least the grace window of {plain(self.grace_s)} s, "
                f"found {plain(self.round_timeout_s)}",
            )

    @property
    def round_steps(self) -> int:
        """Inner steps of one round: H / P, because a round exchanges one fragment of P."""
        return self.sync_every // self.num_fragments

    @property
    def total_steps(self) -> int:
        """Inner steps of one replica that takes part in every round."""
        return self.round_steps * self.total_rounds

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GroupSettings:
        """Read settings that must be complete: no field is ever filled in silently.

        Raises :class:`SettingsError` for a missing, unknown or invalid field.
        """
        known = {spec.name for spec in setting_fields()}
        for name in sorted(known - set(values)):
            raise SettingsError(name, "expected a value in the group's settings, found none")
        for name in sorted(set(values) - known):
            raise SettingsError(name, "is not a group setting this version knows")
        return cls(**values)


_SPECS: tuple[SettingSpec, ...] = ()


def setting_fields() -> tuple[SettingSpec, ...]:
    """The schema, in the order a form shows it."""
    global _SPECS
    if not _SPECS:
        _SPECS = tuple(
            SettingSpec(name=f.name, default=f.default, **f.metadata)
            for f in dataclasses.fields(GroupSettings)
        )
    return _SPECS
