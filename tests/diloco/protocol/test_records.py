"""Records are parsed strictly: anything else is refused with the invalid field."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest

from diloco.protocol import keys
from diloco.protocol.record_base import BOUNDS
from diloco.protocol.records import BadRecord, Command, Commit, Heartbeat, Identity
from diloco.protocol.telemetry import Segment, StepColumns


def commit() -> Commit:
    me = Identity(replica=3, incarnation="00001-0123abcd")
    return Commit(
        round=7,
        fragment=0,
        committer=me,
        contributors=(me,),
        merged_digest="d",
        void="",
        tokens_total=5,
        committed_total=2,
        loss=1.5,
        wall_s=1.0,
    )


def test_a_record_round_trips() -> None:
    assert Commit.from_bytes(commit().to_bytes()) == commit()
    segment = Segment(
        replica=0,
        incarnation="i",
        n=1,
        wall_s=0.0,
        state="computing",
        round=1,
        steps=StepColumns(step=(1, 2), loss=(0.5, math.nan)),
        system={"cpu_s": 1.0},
    )
    again = Segment.from_bytes(segment.to_bytes())
    assert again.steps.step == (1, 2)
    assert math.isnan(again.steps.loss[1])
    command = Command(n=1, command="stop", arguments={"why": ["x", 1]}, wall_s=0.0)
    assert Command.from_bytes(command.to_bytes()) == command


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": 2}, "expected version 3, found 2"),
        ({"round": "7"}, "Commit.round: expected int, found '7'"),
        ({"round": True}, "Commit.round: expected int"),
        ({"void": None}, "Commit.void"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"committer": []}, "Commit.committer: expected an object"),
        ({"committer": {"replica": 1}}, "expected a field 'incarnation'"),
        ({"contributors": {}}, "Commit.contributors: expected a list"),
    ],
)
def test_an_invalid_record_is_refused(change: dict[str, object], words: str) -> None:
    body = json.loads(commit().to_bytes()) | change
    with pytest.raises(BadRecord, match=words):
        Commit.from_bytes(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("replica", -1, "0 to 99999"),
        ("replica", 100_000, "0 to 99999"),
        ("count", -1, "0 to 9223372036854775807"),
        ("round", -1, "0 to 99999999"),
        ("round", 100_000_000, "0 to 99999999"),
        ("step", -1, "0 to 9223372036854775807"),
        ("tokens", -1, "0 to 9223372036854775807"),
        ("pid", -1, "0 to 2147483647"),
        ("pid", 2**31, "0 to 2147483647"),
        ("blocked", -1, "0 to 99999999"),
        ("blocked", 100_000_000, "0 to 99999999"),
    ],
)
def test_a_heartbeat_with_a_number_out_of_bounds_is_refused(
    name: str, value: int, bounds: str
) -> None:
    """Observers build keys from its round."""
    beat = Heartbeat(
        replica=99_999,
        incarnation="00001-0123abcd",
        count=1,
        interval_s=1.0,
        state="computing",
        round=99_999_999,
        step=0,
        tokens=0,
        started_wall_s=0.0,
        wall_s=0.0,
        blocked=0,
    )
    assert Heartbeat.from_bytes(beat.to_bytes()) == beat
    body = json.loads(beat.to_bytes()) | {name: value}
    with pytest.raises(BadRecord, match=f"Heartbeat.{name}: expected {bounds}, found {value}"):
        Heartbeat.from_bytes(json.dumps(body).encode())


def test_every_integer_of_a_heartbeat_has_bounds() -> None:
    integers = {f.name for f in fields(Heartbeat) if str(f.type).startswith("int")}
    bounded = {f.name for f in fields(Heartbeat) if BOUNDS in f.metadata}
    assert integers == bounded


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{", b"\x80\x04K\x01."])
def test_invalid_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadRecord):
        Commit.from_bytes(data)


def test_keys_sort_numerically_and_parse_back() -> None:
    assert keys.commit(9) < keys.commit(10) < keys.commit(100)
    incarnation = keys.incarnation(2, "0123abcd")
    assert keys.parse_beat(keys.beat(7, incarnation)) == (7, incarnation)
    key = keys.contribution_record(5, 7, incarnation)
    assert keys.parse_contribution_record(key) == (5, 7, incarnation)
    assert keys.parse_contribution_record(keys.contribution_payload(5, 7, incarnation)) is None
    assert keys.parse_checkpoint_manifest(keys.checkpoint_manifest(12)) == 12
    with pytest.raises(ValueError, match="8 hex digits"):
        keys.incarnation(1, "../../..")


@pytest.mark.parametrize(
    "key",
    [
        "../credentials.key",
        "/etc/passwd",
        "group.json",
        "checkpoints/00000002/a/weights",
        "",
        "checkpoints/00000001/../../group.json",
        "checkpoints/00000001//x",
        "checkpoints/00000001/",
        "checkpoints/00000001/a?versionId=1",
        "checkpoints/00000001/a\x00b",
        "checkpoints/00000001/\ud800",
        "checkpoints/00000001/" + "a" * 300,
    ],
)
def test_a_manifest_names_only_objects_of_its_own_folder(key: str) -> None:
    from diloco.protocol.group_document import PROTOCOL
    from diloco.protocol.records import CheckpointManifest, FinalManifest, StoredObject

    own = StoredObject(key="checkpoints/00000001/x/weights.safetensors", size_bytes=1, sha256="")
    final = StoredObject(key="final/x/model.safetensors", size_bytes=1, sha256="")
    odd = StoredObject(key=key, size_bytes=1, sha256="")
    writer = {"replica": 0, "incarnation": "00001-0123abcd"}
    for field in ("weights", "outer"):
        body = {
            "v": PROTOCOL,
            "round": 1,
            "writer": writer,
            "model_hash": "",
            "base_rounds": [],
            "tensors": [],
            "weights_digest": "",
            "weights": vars(own),
            "outer": vars(own),
            "tokens_total": 0,
            "wall_s": 0.0,
        }
        CheckpointManifest.from_bytes(json.dumps(body).encode())
        with pytest.raises(BadRecord, match="objects below checkpoints/00000001/"):
            CheckpointManifest.from_bytes(json.dumps(body | {field: vars(odd)}).encode())
    for field in ("weights", "config", "summary"):
        body = {
            "v": PROTOCOL,
            "round": 1,
            "reason": "completed",
            "writer": writer,
            "weights_digest": "",
            "weights": vars(final),
            "config": vars(final),
            "summary": vars(final),
            "wall_s": 0.0,
        }
        FinalManifest.from_bytes(json.dumps(body).encode())
        with pytest.raises(BadRecord, match="objects below final/"):
            FinalManifest.from_bytes(json.dumps(body | {field: vars(odd)}).encode())
