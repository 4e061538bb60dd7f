"""Group settings: one frozen schema, and ``group.json``, the only place a replica reads it from.

The submit form, the settings tab and ``group.json`` are all made from :class:`GroupSettings`;
:func:`setting_fields` gives label, help, unit and bounds of each field to whoever renders it.
There is no flag and no environment variable that overrides a setting.

Errors: :class:`SettingsError` names the field, what was expected and what was found.
:class:`ProtocolMismatch` says that ``group.json`` speaks another protocol than this library.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.rendezvous.schema import (
    SettingsError,
    SettingSpec,
    choice_setting,
    float_setting,
    int_setting,
    plain,
)

__all__ = [
    "GROUP_FORMAT",
    "PROTOCOL",
    "SECTIONS",
    "GroupDocument",
    "GroupSettings",
    "ProtocolMismatch",
    "SettingSpec",
    "SettingsError",
    "canonical_json",
    "setting_fields",
]

PROTOCOL = 1
"""Version of the object layout and of the record formats. Both sides must speak the same."""

GROUP_FORMAT = "archipelago.group"


class ProtocolMismatch(ValueError):
    """``group.json`` was written for another protocol version."""


SECTIONS = {
    "rounds": "Rounds and synchronisation",
    "outer": "Outer optimizer",
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
        "Local steps per round (H)",
        "Inner optimizer steps each replica takes between two exchanges.",
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
    )
    codec: str = choice_setting(
        "fp32",
        "Payload codec",
        "How pseudo-gradients are encoded on their way through the store.",
        "rounds",
        choices=("fp32", "bf16"),
    )
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
        "inner", minimum=0.0,
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
    min_quorum: int = int_setting(
        1,
        "Minimum quorum",
        "A round is not closed with fewer contributors than this; below it the run waits.",
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
    grace_s: float = float_setting(
        60.0,
        "Grace window",
        "Once the quorum has contributed, wait at most this long for live replicas that have not.",
        "membership",
        minimum=0.0,
        maximum=86_400.0,
        unit="s",
    )
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
        "saving", minimum=0, unit="rounds",
    )  # fmt: skip
    checkpoint_every: int = int_setting(
        5, "Checkpoint every", "Rounds between checkpoints of the global weights.",
        "saving", minimum=1, unit="rounds",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for spec in setting_fields():
            object.__setattr__(self, spec.name, spec.check(getattr(self, spec.name)))
        if self.min_quorum > self.num_replicas:
            raise SettingsError(
                "min_quorum",
                f"expected at most the target of {self.num_replicas} replicas, "
                f"found {self.min_quorum}",
            )
        if self.max_replicas < self.num_replicas:
            raise SettingsError(
                "max_replicas",
                f"expected at least the target of {self.num_replicas} replicas, "
                f"found {self.max_replicas}",
            )
        if self.warmup_steps > self.total_steps:
            raise SettingsError(
                "warmup_steps",
                f"expected at most the {self.total_steps} inner steps of the whole run "
                f"(rounds x H), found {self.warmup_steps}",
            )
        if self.round_timeout_s <= self.heartbeat_timeout_s:
            raise SettingsError(
                "round_timeout_s",
                f"expected more than the heartbeat timeout of {plain(self.heartbeat_timeout_s)} "
                f"s, found {plain(self.round_timeout_s)}",
            )

    @property
    def total_steps(self) -> int:
        """Inner steps of one replica that takes part in every round."""
        return self.sync_every * self.total_rounds

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GroupSettings:
        """Read settings that must be complete: no field is ever filled in silently.

        Raises :class:`SettingsError` for a missing, unknown or invalid field.
        """
        known = {spec.name for spec in setting_fields()}
        for name in known - set(values):
            raise SettingsError(name, "expected a value in the group's settings, found none")
        for name in set(values) - known:
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


def canonical_json(value: Any) -> bytes:
    """One spelling per value, so that equal documents have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


@dataclass(frozen=True, kw_only=True)
class GroupDocument:
    """``group.json``: what a replica has to know, and all it is told.

    ``workload`` is a JSON object whose ``kind`` names the workload; ``code`` is the sha256 of the
    bundle under ``code/``, or '' when the replica library is installed where replicas run.
    """

    run_id: str
    name: str
    settings: GroupSettings
    workload: Mapping[str, Any]
    code: str = ""

    @property
    def fingerprint(self) -> str:
        """sha256 of everything in the document but the fingerprint itself."""
        return hashlib.sha256(canonical_json(self._body())).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {
            "format": GROUP_FORMAT,
            "protocol": PROTOCOL,
            "run_id": self.run_id,
            "name": self.name,
            "settings": self.settings.to_dict(),
            "workload": dict(self.workload),
            "code": self.code,
        }

    def to_bytes(self) -> bytes:
        body = self._body() | {"fingerprint": self.fingerprint}
        return json.dumps(body, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> GroupDocument:
        """Parse and verify ``group.json``.

        Raises :class:`ProtocolMismatch` for another protocol, :class:`SettingsError` for anything
        else that is not as it should be.
        """
        try:
            body = json.loads(data)
        except ValueError as error:
            raise SettingsError("", f"group.json: expected JSON, found {error}") from None
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        if found != GROUP_FORMAT:
            raise SettingsError(
                "", f"group.json: expected format {GROUP_FORMAT!r}, found {found!r}"
            )
        if body.get("protocol") != PROTOCOL:
            raise ProtocolMismatch(
                f"group.json: this library speaks protocol {PROTOCOL}, "
                f"found protocol {body.get('protocol')!r}"
            )
        try:
            document = cls(
                run_id=body["run_id"],
                name=body["name"],
                settings=GroupSettings.from_dict(body["settings"]),
                workload=body["workload"],
                code=body["code"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingsError("", f"group.json: malformed ({error!r})") from None
        if body.get("fingerprint") != document.fingerprint:
            raise SettingsError(
                "",
                f"group.json: expected fingerprint {document.fingerprint}, "
                f"found {body.get('fingerprint')}",
            )
        return document
