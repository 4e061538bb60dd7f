"""The grammar of keys: every generated key is recognized, and no other key."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator

import pytest

from diloco.protocol import keys
from diloco.protocol.keys import Kind, is_folder, kind_of
from diloco.store import folders

INCARNATION = "00002-9f31c07a"
VALUES = {
    "replica": 7,
    "incarnation": INCARNATION,
    "round": 12,
    "first": 17,
    "shard": 3,
    "slice": 3,
    "digest": "a" * 64,
    "sha256": "b" * 64,
    "n": 1,
    "nonce": "0123456789abcdef",
    "part": "parts",
    "number": 2,
    "epoch": 1,
    "seq": 4,
    "name": "0123456789abcdef",
}
OBJECTS = {
    keys.checkpoint_dir: ("weights.safetensors", "outer.safetensors"),
    keys.replica_state_dir: ("state.safetensors", "leaving.safetensors", "manifest.json"),
    keys.final_dir: ("model.safetensors", "config.json", "summary.json", "sample.json"),
}
"""Object names in the folders that these functions return."""
NOT_OF_RUNS = ("allreduce", "incarnation", "parse_", "kind_of", "round_of_", "is_")


def made() -> Iterator[str]:
    """Return one key of every function of the module that returns keys."""
    yield from (keys.OWNER, keys.GROUP, keys.FINAL_MANIFEST)
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if name.startswith(("_", *NOT_OF_RUNS)):
            continue
        path = function(**{name: VALUES[name] for name in inspect.signature(function).parameters})
        if not path.endswith("/"):
            yield path
        yield from (f"{path}{name}" for name in OBJECTS.get(function, ()))


def test_every_generated_key_and_its_folders_are_recognized() -> None:
    every = [*made()]
    assert {kind_of(key) for key in every} == set(Kind)
    for key in every:
        folders = itertools.accumulate(key.split("/")[:-1], lambda above, name: f"{above}/{name}")
        assert all(map(is_folder, folders)), key


@pytest.mark.parametrize(
    "key",
    [
        "",
        "notes.txt",
        "group.json.bak",
        "code/train.py",
        "code/notes/x.zip",
        "code/../group.json",
        f"code/{'A' * 64}.zip",
        f"code/{'a' * 64}.zip\n",
        "members/7/x/beat.json",
        f"members/00007/{INCARNATION}/beat.json.tmp",
        "members/٠٠٠٠٧/00002-9f31c07a/beat.json",
        "rounds/00000012/plan.json/x",
        "rounds/12/plan.json",
        "rounds/00000012/notes.json",
        f"rounds/00000012/reduced/00003.{'a' * 63}",
        "checkpoints/best.safetensors",
        f"checkpoints/00000012/00007.{INCARNATION}/notes.txt",
        "checkpoints/00000012/manifest.jsonl",
        f"state/00007/{INCARNATION}.00000012/x/y.safetensors",
        "telemetry/report.json",
        "control/1.json",
        "control/journal/x.json",
        "final/model.safetensors",
        "heal/x",
        "packs/00000017.pack",
        "packs/2/00000017.pack",
        "preflight/x",
        "sagemaker/output.tar.gz",
        "ROUNDS/00000012/plan.json",
    ],
)
def test_other_keys_are_not_recognized(key: str) -> None:
    assert kind_of(key) is None


@pytest.mark.parametrize("path", ["", "code/x", "notes", "rounds/12", "members/00007/x", "heal"])
def test_other_folders_are_not_recognized(path: str) -> None:
    assert not is_folder(path)


def test_checkpoint_weights_are_matched_by_round() -> None:
    key = f"{keys.checkpoint_dir(12, 7, INCARNATION)}weights.safetensors"
    assert keys.is_weights_of(key, 12)
    assert not keys.is_weights_of(key, 13)
    assert not keys.is_weights_of(keys.checkpoint_manifest(12), 12)
    final = f"{keys.final_dir(7, INCARNATION)}model.safetensors"
    assert keys.is_final_weights(final)
    assert not keys.is_final_weights(key)
    assert not keys.is_final_weights(f"final/../{final}")


def test_the_store_lists_the_top_level_folders() -> None:
    names = re.findall("[a-z]+", keys._FOLDERS.pattern)
    assert {name for name in names if keys.is_folder(name)} == folders.FOLDERS
