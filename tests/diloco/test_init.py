"""``python -m diloco.init``: one group document, from options and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco.init import main
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.store.base import LocalStore


def document(root: Path) -> GroupDocument:
    return GroupDocument.from_bytes(LocalStore(root).get(keys.GROUP))


def test_options_override_the_file(tmp_path: Path) -> None:
    chosen = tmp_path / "settings.json"
    chosen.write_text(json.dumps({"sync_every": 20, "outer_lr": 0.5, "warmup_steps": 0}))
    root = tmp_path / "run"
    assert main([str(root), "--settings", str(chosen), "--sync-every", "40"]) == 0
    result = document(root)
    assert (result.settings.sync_every, result.settings.outer_lr) == (40, 0.5)
    assert result.workload["kind"] == "byte_gpt"


def test_own_loop_has_no_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--own-loop"]) == 0
    assert document(tmp_path).workload == {"kind": "caller"}
    assert "diloco.join(" in capsys.readouterr().out


def test_a_second_group_under_a_uri_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    before = document(tmp_path)
    assert main([str(tmp_path), "--sync-every", "7"]) == 1
    assert "expected no group" in capsys.readouterr().err
    assert document(tmp_path) == before


def test_an_invalid_setting_creates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "run"), "--sync-every", "0"]) == 1
    assert "sync_every: expected 1 or more, found 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_workload_comes_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "workload.json"
    described = {"kind": "huggingface", "config": {"model_type": "llama"}, "context": 32}
    file.write_text(json.dumps(described))
    assert main([str(tmp_path / "run"), "--workload", str(file)]) == 0
    result = document(tmp_path / "run").workload
    assert result | described == result
    file.write_text(json.dumps({**described, "kind": "jax"}))
    assert main([str(tmp_path / "other"), "--workload", str(file)]) == 1
    assert "expected an object of a kind byte_gpt, huggingface" in capsys.readouterr().err
