"""Group settings: one frozen schema for the whole group.

The submit form, the settings tab and ``group.json`` (:mod:`diloco.protocol.group_document`) are
generated from :class:`GroupSettings`; :func:`setting_fields` returns label, help, unit and bounds
of each field.

Errors: :class:`SettingsError` names the field and the expected and found values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol.outer_rule_names import NESTEROV, rule_names
from diloco.protocol.payload_size import (
    CODEC_SHAPES,
    FULL_MEAN,
    LOW_BIT_CODECS,
    RESIDUAL_REACH,
)
from diloco.protocol.setting_rules import check_exchange, check_membership, check_rounds
from diloco.protocol.setting_spec import (
    SettingsError,
    SettingSpec,
    choice_setting,
    float_setting,
    int_setting,
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


REPLACED = {
    "late_policy": "was replaced by late_keep, the share of late work that is kept: enter "
    "late_keep = 1 to keep it, 0 to drop it",
}
"""Settings of earlier versions, and what to enter instead."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """All group settings, validated on construction. Defaults follow the DiLoCo paper
    (arXiv:2311.08105) as far as a small run allows."""

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
        20,
        "Rounds",
        "The run has succeeded when this many rounds have been committed.",
        "rounds",
        minimum=1,
        maximum=1_000_000,
        unit="rounds",
    )
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
        "off",
        "Dynamic local updates",
        "on: a replica of speed v takes max(1, floor(v / max v x H)) steps, so that fast and slow "
        "ones arrive together (arXiv:2401.09135).",
        "rounds",
        choices=("off", "on"),
    )
    num_fragments: int = int_setting(
        1,
        "Fragments (P)",
        "The weights are divided into this many fragments that are exchanged in turn, one every "
        "H / P steps, which divides the peak bandwidth by P (Streaming DiLoCo, arXiv:2501.18512).",
        "rounds",
        minimum=1,
        maximum=1024,
        unit="fragments",
    )
    fragment_pattern: str = choice_setting(
        "strided",
        "Fragment pattern",
        "strided: every P-th layer; sequential: neighbouring layers; size: neighbouring tensors "
        "of about equal bytes.",
        "rounds",
        choices=("strided", "sequential", "size"),
    )
    overlap_steps: int = int_setting(
        0,
        "Overlap (tau)",
        "The exchange runs in the background during this many inner steps. 0: replicas wait.",
        "rounds",
        minimum=0,
        maximum=100_000,
        unit="steps",
        zero="none",
    )
    mixing_alpha: float = float_setting(
        0.5,
        "Mixing (alpha)",
        "With overlap: how much of the steps made during the exchange is kept, on top of the new "
        "global weights. 0: none, 1: all.",
        "rounds",
        minimum=0.0,
        maximum=1.0,
        zero="none kept",
    )
    codec: str = choice_setting(
        "fp32",
        "Payload codec",
        "Encoding of pseudo-gradients in the store; sums are always fp32.",
        "exchange",
        choices=tuple(CODEC_SHAPES),
    )
    topk: int = int_setting(
        64,
        "Top-k",
        "Values kept of each 4,096, for the top-k codec (SparseLoCo, arXiv:2508.15706).",
        "exchange",
        minimum=1,
        maximum=4096,
        unit="values",
    )
    error_feedback: float = float_setting(
        0.95,
        "Error feedback",
        "Decay of the values that top-k omitted when they are added to the next contribution. "
        "0: they are dropped.",
        "exchange",
        minimum=0.0,
        maximum=1.0,
        zero="dropped",
    )
    mean_codec: str = choice_setting(
        "full",
        "Mean codec",
        "Encoding of the mean that sharded and syncer rounds store. full: fp32, or bf16 with bf16 "
        "payloads. Another codec: fewer bits; the rounding error enters the next mean. Gathered "
        "rounds store none: the reduce plan gather needs full.",
        "exchange",
        choices=(FULL_MEAN, *LOW_BIT_CODECS),
    )
    reduce_plan: str = choice_setting(
        "auto",
        "Reduce plan",
        "gather: every replica reads all payloads. sharded: each contributor reduces a slice for "
        "all. syncer: a process in the bucket's region reduces everything. auto: the fastest.",
        "exchange",
        choices=("auto", "gather", "sharded", "syncer"),
    )
    frozen: str = choice_setting(
        "equal",
        "Frozen parameters",
        "Parameters without gradients are never exchanged. equal: all replicas need the same, e.g. "
        "the base model of LoRA adapters; each join compares digests. local: each replica has its "
        "own values, e.g. of a teacher; each join compares names, shapes and dtypes only.",
        "exchange",
        choices=("equal", "local"),
    )
    outer_lr: float = float_setting(
        0.7,
        "Outer learning rate",
        "Step size of the outer optimizer on the averaged pseudo-gradient, at its peak.",
        "outer",
        minimum=0.0,
        maximum=10.0,
    )
    outer_momentum: float = float_setting(
        0.9,
        "Outer momentum",
        "Nesterov momentum of the outer optimizer.",
        "outer",
        minimum=0.0,
        maximum=0.9999,
    )
    outer_schedule: str = choice_setting(
        "constant",
        "Outer schedule",
        "After the outer warm-up. constant: the outer learning rate stays at its peak. linear, "
        "cosine: it falls to its final value in the last round.",
        "outer",
        choices=("constant", "linear", "cosine"),
    )
    outer_warmup_rounds: int = int_setting(
        0,
        "Outer warm-up",
        "Rounds in which the outer learning rate rises linearly to its peak.",
        "outer",
        minimum=0,
        maximum=1_000_000,
        unit="rounds",
        zero="none",
    )
    outer_min_lr_ratio: float = float_setting(
        0.0,
        "Final outer learning rate",
        "With the outer schedules linear and cosine: outer learning rate of the last round, as a "
        "fraction of the peak. 0: the last round leaves the weights unchanged.",
        "outer",
        minimum=0.0,
        maximum=1.0,
    )
    outer_rule: str = choice_setting(
        NESTEROV,
        "Outer rule",
        "nesterov: SGD with Nesterov momentum. Installed packages can add rules; every replica "
        "needs the package.",
        "outer",
        choices=rule_names(),
    )
    master_dtype: str = choice_setting(
        "fp32",
        "Master weights",
        "Precision in which every replica holds the global weights in host memory. bf16: half the "
        "memory and half the size of a checkpoint; values are rounded up or down at random, with "
        "the same bits on every replica.",
        "outer",
        choices=("fp32", "bf16"),
    )
    momentum_dtype: str = choice_setting(
        "fp32",
        "Outer momentum precision",
        "Precision of the outer optimizer's state in host memory and in checkpoints. bf16: half "
        "of both, rounded as the master weights are.",
        "outer",
        choices=("fp32", "bf16"),
    )
    weighting: str = choice_setting(
        "uniform",
        "Contribution weights",
        "uniform: every replica counts the same. tokens: a replica counts by its tokens per round "
        "of work.",
        "outer",
        choices=("uniform", "tokens"),
    )
    merge: str = choice_setting(
        "mean",
        "Merge",
        "mean: weighted mean. rda: direction and length averaged apart, per tensor; embeddings "
        "by mean (Decoupled DiLoCo, arXiv:2604.21428).",
        "outer",
        choices=("mean", "rda"),
    )
    late_keep: float = float_setting(
        0.5,
        "Late work kept",
        "A replica that missed a round keeps its progress on top of the new weights, without the "
        "component along the mean of the round; if it is more than one round of work, this share "
        "of it. The weights of a round leave room for it, which shrinks by the same share. If no "
        "other replica was late for eight rounds, it keeps all, and gets no room (not with "
        "fragments or an outlier limit). 0: it drops its progress, and the contributors divide "
        "the weights.",
        "outer",
        minimum=0.0,
        maximum=1.0,
        zero="none kept",
    )
    outlier_z: float = float_setting(
        0.0,
        "Outlier limit",
        "Refuse a contribution whose norm lies this many robust standard deviations above the "
        "round's median (with four or more contributions). 0: never.",
        "outer",
        minimum=0.0,
        maximum=1000.0,
        zero="never",
    )
    inner_optimizer: str = choice_setting(
        "adamw",
        "Inner optimizer",
        "Optimizer of the built-in workloads. muon: Muon for the matrices of hidden layers, AdamW "
        "for all other parameters (torch 2.9 or newer).",
        "inner",
        choices=("adamw", "muon"),
    )
    inner_lr: float = float_setting(
        4e-4,
        "Inner learning rate",
        "Peak learning rate of the inner optimizer.",
        "inner",
        minimum=0.0,
        maximum=10.0,
    )
    warmup_steps: int = int_setting(
        100,
        "Warm-up",
        "Inner steps until the peak learning rate, then cosine decay.",
        "inner",
        minimum=0,
        unit="steps",
    )
    min_lr_ratio: float = float_setting(
        0.1,
        "Final learning rate",
        "Learning rate at the end of the cosine, as a fraction of the peak.",
        "inner",
        minimum=0.0,
        maximum=1.0,
    )
    weight_decay: float = float_setting(
        0.1,
        "Weight decay",
        "Decoupled weight decay, on matrices only.",
        "inner",
        minimum=0.0,
        maximum=10.0,
    )
    grad_clip: float = float_setting(
        1.0,
        "Gradient clip",
        "Global norm the inner gradient is clipped to. 0 means no clipping.",
        "inner",
        minimum=0.0,
        zero="none",
    )
    batch_size: int = int_setting(
        8,
        "Batch size",
        "Sequences per inner step and replica.",
        "inner",
        minimum=1,
        maximum=65_536,
        unit="sequences",
    )
    seed: int = int_setting(
        0,
        "Seed",
        "Seed of the initial weights and of the data order.",
        "inner",
        minimum=0,
        maximum=2**31 - 1,
    )
    num_replicas: int = int_setting(
        4,
        "Target replicas",
        "Number of replicas of the run. The sizes of its pools must add up to it.",
        "membership",
        minimum=1,
        maximum=1024,
        unit="replicas",
    )
    max_replicas: int = int_setting(
        16,
        "Data shards",
        "The training data is divided into this many shards, one per replica number. Fixed for the "
        "life of the run, so that replicas can join and leave.",
        "membership",
        minimum=1,
        maximum=99_999,
        unit="shards",
    )
    world_size_mode: str = choice_setting(
        "dynamic",
        "World size",
        "dynamic: the mean is over all contributors. fixed_with_spares: every round has exactly "
        "the target number of contributors; additional replicas are spares.",
        "membership",
        choices=("dynamic", "fixed_with_spares"),
    )
    min_quorum: int = int_setting(
        1,
        "Minimum quorum",
        "A round needs at least this many contributors; below it the run waits.",
        "membership",
        minimum=1,
        maximum=1024,
        unit="replicas",
    )
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
        0,
        "Start together",
        "The first step of the run waits until this many replicas are ready, however long that "
        "takes. 0: start after the wait above with the replicas that are ready.",
        "membership",
        minimum=0,
        maximum=1024,
        unit="replicas",
        zero="those ready",
    )
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
        0.0,
        "Adaptive grace",
        "Above 0, the window is this share of the time that overlap leaves: gamma x (tau x step - "
        "time to quorum - time to sync), at most the grace window. 0: always the whole window.",
        "membership",
        minimum=0.0,
        maximum=10.0,
        zero="off",
    )
    grace_floor_s: float = float_setting(
        1.0,
        "Shortest grace",
        "Lower limit of the adaptive window, so that slow replicas can contribute.",
        "membership",
        minimum=0.0,
        maximum=86_400.0,
        unit="s",
    )
    partial_rounds: str = choice_setting(
        "on",
        "Partial rounds",
        "on: a replica too slow for the grace window, or one that joins in the middle of a round, "
        "contributes the steps it has, instead of missing the round.",
        "membership",
        choices=("off", "on"),
    )
    quarantine_rounds: int = int_setting(
        0,
        "Quarantine",
        "A replica's contributions do not count in its first rounds while other replicas are "
        "available: its inner optimizer is not warmed up yet.",
        "membership",
        minimum=0,
        maximum=10_000,
        unit="rounds",
        zero="none",
    )
    heartbeat_timeout_s: float = float_setting(
        15.0,
        "Heartbeat timeout",
        "A replica whose lease has not changed for this long is considered dead.",
        "membership",
        minimum=1.0,
        maximum=3600.0,
        unit="s",
    )
    round_timeout_s: float = float_setting(
        900.0,
        "Round timeout",
        "A replica fails if one exchange takes longer than this.",
        "membership",
        minimum=1.0,
        maximum=86_400.0,
        unit="s",
    )
    eval_every: int = int_setting(
        1,
        "Evaluate every",
        "Rounds between evaluations of the global weights. 0 means never.",
        "saving",
        minimum=0,
        unit="rounds",
        zero="never",
    )
    checkpoint_every: int = int_setting(
        5,
        "Checkpoint every",
        "Rounds between checkpoints of the global weights.",
        "saving",
        minimum=1,
        unit="rounds",
    )

    state_every: int = int_setting(
        5,
        "Save replica state every",
        "Rounds between saves of each replica's inner optimizer, residual and data position, for "
        "a relaunch under the same number. 0 means only when it leaves.",
        "saving",
        minimum=0,
        unit="rounds",
        zero="only when leaving",
    )
    pack_records: str = choice_setting(
        "on",
        "Pack old records",
        "on: the records of old rounds are merged into one object per 16 rounds, so that a long "
        "run is imported in few requests.",
        "saving",
        choices=("on", "off"),
    )
    telemetry_packs: int = int_setting(
        1000,
        "Telemetry kept",
        "Newest packs of telemetry that the bucket keeps of each replica; older ones are deleted. "
        "A pack has 64 segments, which take 21 minutes to write. 0: all are kept.",
        "saving",
        minimum=0,
        unit="packs",
        zero="all",
    )

    def __post_init__(self) -> None:
        for spec in setting_fields():
            object.__setattr__(self, spec.name, spec.check(getattr(self, spec.name)))
        check_rounds(self)
        check_exchange(self)
        check_membership(self)

    @property
    def round_steps(self) -> int:
        """Inner steps of one round: H / P, because a round exchanges one of P fragments."""
        return self.sync_every // self.num_fragments

    @property
    def total_steps(self) -> int:
        """Inner steps of one replica that takes part in every round."""
        return self.round_steps * self.total_rounds

    @property
    def residual_rounds(self) -> int:
        """Earlier rounds whose reduced objects a round can read: those of a low-bit mean."""
        return RESIDUAL_REACH * self.num_fragments if self.mean_codec != FULL_MEAN else 0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def differences(self, other: GroupSettings) -> tuple[str, ...]:
        """Describe the settings whose value in ``other`` differs, in the order of the schema."""
        return tuple(
            f"{spec.name}: expected {getattr(self, spec.name)}, found {getattr(other, spec.name)}"
            for spec in setting_fields()
            if getattr(self, spec.name) != getattr(other, spec.name)
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GroupSettings:
        """Read complete settings; missing fields are not filled with defaults.

        Raises :class:`SettingsError` for a replaced, missing, unknown or invalid field.
        """
        for name in sorted(REPLACED.keys() & values.keys()):
            raise SettingsError(name, REPLACED[name])
        known = {spec.name for spec in setting_fields()}
        for name in sorted(known - set(values)):
            raise SettingsError(
                name,
                "expected a value in the group's settings, found none. If an earlier version made "
                "the group, install that version, or start a new group with this one",
            )
        for name in sorted(set(values) - known):
            raise SettingsError(name, "is not a group setting of this version")
        return cls(**values)


_SPECS: tuple[SettingSpec, ...] = ()


def setting_fields() -> tuple[SettingSpec, ...]:
    """Return the schema in the order of the form."""
    global _SPECS
    if not _SPECS:
        _SPECS = tuple(
            SettingSpec(name=f.name, default=f.default, **f.metadata)
            for f in dataclasses.fields(GroupSettings)
        )
    return _SPECS
