"""``python -m diloco.track``: a bucket mirrored to TensorBoard files, each point once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco import track
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import Evaluation, Segment, StepColumns
from diloco.store.base import Store
from diloco.store.open import open_store
from diloco.trackers.tensorboard import TensorBoardTracker
from tests.diloco.clocks import FastClock

INCARNATIONS = ("00001-aaaaaaaa", "00002-bbbbbbbb")


def segment(n: int, first: int, *, incarnation: str = INCARNATIONS[0], **more: Any) -> Segment:
    steps = tuple(range(first, first + 10))
    columns = StepColumns(
        step=steps,
        round=tuple(1 + step // 20 for step in steps),
        wall_s=tuple(1.9e9 + step for step in steps),
        tokens=tuple(100 * step for step in steps),
        loss=tuple(1 / (1 + step) for step in steps),
    )
    return Segment(
        replica=0, incarnation=incarnation, n=n, wall_s=1.9e9 + first + 9, state="computing",
        round=1, steps=columns, system={"rss_bytes": 1e9}, **more,
    )  # fmt: skip


def put(store: Store, part: Segment) -> None:
    store.put(keys.telemetry(0, part.incarnation, part.n), part.to_bytes())


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = (tmp_path / "run").as_uri()
    store = open_store(uri)
    store.put(keys.GROUP, GroupDocument.new(GroupSettings(num_replicas=2)).to_bytes())
    for incarnation in INCARNATIONS:
        store.put(keys.beat(0, incarnation), b"{}")
    put(store, segment(1, 0, evaluations=(Evaluation(round=0, loss=6.0, tokens=0, wall_s=1.9e9),)))
    put(store, segment(2, 10))
    return uri


def mirror(uri: str, folder: Path, *more: str) -> int:
    options = ["--to", "tensorboard", "--server", str(folder / "logs")]
    return track.main(
        [uri, *options, "--state", str(folder / "mirror.json"), *more], clock=FastClock()
    )


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    [logdir] = (folder / "logs").iterdir()
    read = accumulator.EventAccumulator(str(logdir), size_guidance={"scalars": 0})
    read.Reload()
    names: Sequence[str] = read.Tags()["scalars"]
    return [(name, e.step, e.value) for name in names for e in read.Scalars(name)]


def test_each_point_once_also_of_a_process_that_repeats_steps(uri: str, tmp_path: Path) -> None:
    assert mirror(uri, tmp_path) == 0
    store = open_store(uri)
    put(store, segment(1, 15, incarnation=INCARNATIONS[1]))
    store.put(keys.telemetry(0, INCARNATIONS[1], 2), b"no segment")
    put(store, segment(3, 25, incarnation=INCARNATIONS[1]))
    store.put(keys.FINAL_MANIFEST, b"{}")
    assert mirror(uri, tmp_path, "--follow") == 0
    assert mirror(uri, tmp_path) == 0
    found = scalars(tmp_path)
    assert sorted(step for name, step, _ in found if name == "replica/0/loss") == list(range(35))
    assert [(step, value) for name, step, value in found if name == "eval_loss"] == [(0, 6.0)]
    assert len({(name, step) for name, step, _ in found}) == len(found)


def test_segments_that_were_deleted_meanwhile_are_passed(uri: str, tmp_path: Path) -> None:
    assert mirror(uri, tmp_path) == 0
    store = open_store(uri)
    put(store, segment(70, 700))
    put(store, segment(71, 710))
    assert mirror(uri, tmp_path) == 0
    steps = [step for name, step, _ in scalars(tmp_path) if name == "replica/0/loss"]
    assert sorted(steps) == [*range(20), *range(700, 720)]


def test_a_command_that_was_killed_continues(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    deliver = TensorBoardTracker.log

    def killed(self: Any, *arguments: Any) -> Any:
        deliver(self, *arguments)
        raise Killed

    monkeypatch.setattr(TensorBoardTracker, "log", killed)
    with pytest.raises(Killed):
        mirror(uri, tmp_path)
    monkeypatch.setattr(TensorBoardTracker, "log", deliver)
    assert mirror(uri, tmp_path) == 0
    steps = [step for name, step, _ in scalars(tmp_path) if name == "replica/0/loss"]
    assert steps == list(range(20))


def test_wrong_options_are_refused(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert track.main([uri, "--to", "mlflow", "--server", "x"]) == 2
    assert "Experiment: enter a value" in capsys.readouterr().err
    (tmp_path / "mirror.json").write_text(json.dumps({"rows": 3}))
    assert mirror(uri, tmp_path) == 2
    assert "is no state of a mirror" in capsys.readouterr().err
    nothing = (tmp_path / "nothing").as_uri()
    (tmp_path / "mirror.json").unlink()
    assert mirror(nothing, tmp_path) == 2
