"""Group settings: validation, the group document and its fingerprint."""

from __future__ import annotations

import json

import pytest

from diloco.protocol.group_document import GroupDocument, ProtocolMismatch
from diloco.protocol.payload_size import CODEC_SHAPES
from diloco.protocol.settings import GroupSettings, SettingsError, setting_fields

CODECS = ", ".join(CODEC_SHAPES)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"sync_every": 0}, "sync_every", "expected 1 or more, found 0"),
        ({"sync_every": 2.5}, "sync_every", "whole number"),
        ({"sync_every": True}, "sync_every", "whole number"),
        ({"inner_lr": "fast"}, "inner_lr", "finite number"),
        ({"inner_lr": float("nan")}, "inner_lr", "finite number"),
        ({"codec": "zip"}, "codec", f"expected one of {CODECS}, found 'zip'"),
        ({"min_quorum": 5, "num_replicas": 4}, "min_quorum", "at most the target of 4"),
        ({"start_replicas": 5, "num_replicas": 4}, "start_replicas", "at most the target of 4"),
        ({"max_replicas": 2, "num_replicas": 4}, "max_replicas", "at least the target of 4"),
        (
            {"warmup_steps": 999, "sync_every": 10, "total_rounds": 2},
            "warmup_steps",
            "at most the 20",
        ),
        (
            {"warmup_steps": 11, "sync_every": 10, "total_rounds": 2, "num_fragments": 2},
            "warmup_steps",
            "at most the 10",
        ),
        ({"num_fragments": 3, "sync_every": 10}, "num_fragments", "a divisor of the 10 local"),
        ({"overlap_steps": 10, "sync_every": 10}, "overlap_steps", "less than the 10 local"),
        (
            {"overlap_steps": 5, "sync_every": 10, "num_fragments": 2, "dylu": "on"},
            "overlap_steps",
            "less than the 5 steps of a round",
        ),
        (
            {"world_size_mode": "fixed_with_spares", "min_quorum": 1, "num_replicas": 2},
            "min_quorum",
            "the world size is fixed",
        ),
        (
            {"overlap_steps": 1, "grace_gamma": 1, "grace_s": 1, "grace_floor_s": 2},
            "grace_floor_s",
            "at most",
        ),
        ({"outer_warmup_rounds": 21}, "outer_warmup_rounds", "at most the 20 rounds of the run"),
        ({"outer_min_lr_ratio": 0.1}, "outer_min_lr_ratio", "expected 0 with the outer schedule"),
        ({"late_keep": 2}, "late_keep", "expected 1 or less, found 2"),
        ({"mean_codec": "fp32"}, "mean_codec", "expected one of full, int8, "),
        (
            {"mean_codec": "int8", "reduce_plan": "gather"},
            "mean_codec",
            "expected full, because the reduce plan gather stores no mean.* found int8",
        ),
        ({"grace_gamma": 1}, "grace_gamma", "expected 0 without overlap"),
        ({"grace_s": 901, "round_timeout_s": 900}, "round_timeout_s", "the grace window of 901"),
        ({"round_timeout_s": 5, "heartbeat_timeout_s": 10}, "round_timeout_s", "more than"),
    ],
)
def test_an_error_names_the_field_and_the_expected_and_found_values(
    changes: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        GroupSettings(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_every_setting_has_the_metadata_of_a_form_field() -> None:
    for spec in setting_fields():
        assert spec.label and spec.help.endswith(".")
        assert spec.check(spec.default) == spec.default


def test_settings_of_a_document_must_be_complete_and_known() -> None:
    values = GroupSettings().to_dict()
    assert GroupSettings.from_dict(values) == GroupSettings()
    del values["sync_every"]
    with pytest.raises(SettingsError, match="sync_every: expected a value"):
        GroupSettings.from_dict(values)
    del values["weighting"]  # the first one in the error is always the same
    with pytest.raises(SettingsError, match="sync_every: expected a value"):
        GroupSettings.from_dict(values)
    with pytest.raises(SettingsError, match="turbo: is not a group setting"):
        GroupSettings.from_dict({**GroupSettings().to_dict(), "turbo": 1})


def test_a_replaced_setting_is_refused_with_what_to_enter() -> None:
    values = GroupSettings().to_dict() | {"late_policy": "rebase"}
    with pytest.raises(SettingsError, match="enter late_keep = 1 to keep it, 0 to") as caught:
        GroupSettings.from_dict(values)
    assert caught.value.field == "late_policy"
    del values["late_keep"]  # the settings of an earlier version
    with pytest.raises(SettingsError, match="late_policy: was replaced by late_keep"):
        GroupSettings.from_dict(values)


def document() -> GroupDocument:
    return GroupDocument(
        run_id="r", name="n", settings=GroupSettings(), workload={"kind": "byte_gpt"}
    )


def test_a_document_round_trips_with_its_fingerprint() -> None:
    again = GroupDocument.from_bytes(document().to_bytes())
    assert again == document()
    assert again.fingerprint == document().fingerprint


def test_an_edited_document_is_refused() -> None:
    body = json.loads(document().to_bytes())
    body["settings"]["sync_every"] += 1
    with pytest.raises(SettingsError, match="expected fingerprint"):
        GroupDocument.from_bytes(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"protocol": 2},
            ProtocolMismatch,
            "expected protocol 3, the version of this library, found protocol 2",
        ),
        ({"format": "other"}, SettingsError, "expected format 'archipelago.group', found 'other'"),
        ({"settings": {}}, SettingsError, "expected a value"),
        ({"settings": None}, SettingsError, "settings: expected an object"),
    ],
)
def test_a_document_of_another_format_is_refused(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    body = json.loads(document().to_bytes()) | change
    with pytest.raises(error, match=words):
        GroupDocument.from_bytes(json.dumps(body).encode())
    with pytest.raises(SettingsError, match="expected JSON"):
        GroupDocument.from_bytes(b"{")
