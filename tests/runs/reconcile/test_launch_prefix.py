"""A run is launched only into a prefix that is empty or carries its own marker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diloco.protocol import keys
from diloco.protocol.ownership import owner_of
from runs.ingest.stores import store_for
from tests.runs.launching import MakeRun, launched

pytestmark = pytest.mark.django_db


def test_the_marker_is_written_first(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    written: list[str] = []
    real = type(store_for(run)).create

    def create(self: Any, key: str, data: bytes) -> bool:
        written.append(key)
        return real(self, key, data)

    monkeypatch.setattr(type(store_for(run)), "create", create)
    assert launched(run).state == "provisioning"
    assert written == [keys.OWNER, keys.code_bundle(run.code_sha256), keys.GROUP]
    assert owner_of(store_for(run)) == str(run.pk)


def test_a_nonempty_folder_ends_the_launch(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "train.py").write_text("mine")
    run = launched(make_run(rendezvous=str(folder)))
    assert run.state == "failed"
    assert "expected an empty prefix, found 'code/train.py'" in run.state_reason
    assert [path.name for path in folder.rglob("*")] == ["code", "train.py"]


def test_the_prefix_of_another_run_ends_the_launch(make_run: MakeRun) -> None:
    other, run = launched(make_run()), make_run()
    store_for(run).put(keys.OWNER, store_for(other).get(keys.OWNER))
    launched(run)
    assert run.state == "failed"
    assert f"found owner.json of run {other.pk}" in run.state_reason


def test_a_launch_repeated_after_the_marker_continues(make_run: MakeRun) -> None:
    run = make_run()
    from diloco.protocol.ownership import mark

    mark(store_for(run), str(run.pk))
    store_for(run).put(keys.code_bundle("0" * 64), b"half")
    assert launched(run).state == "provisioning"


def test_a_run_without_a_marker_gets_one(make_run: MakeRun) -> None:
    run = launched(make_run())
    store_for(run).delete([keys.OWNER])
    type(run).objects.filter(pk=run.pk).update(state="queued")
    run.refresh_from_db()
    assert launched(run).state == "provisioning"
    assert owner_of(store_for(run)) == str(run.pk)


def test_a_folder_replaced_by_a_link_is_not_opened(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(rendezvous=str(tmp_path / "mine"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")
    launched(run)
    assert run.state == "failed"
    assert "symbolic link" in run.state_reason
    assert os.listdir(tmp_path / "elsewhere") == []
