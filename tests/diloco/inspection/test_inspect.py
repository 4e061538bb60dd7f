"""Reading a run out of its bucket, and the command that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco.inspect import inspect, main
from diloco.inspection.reader import last_that
from diloco.inspection.reading import NotARun, Scope
from diloco.protocol import keys
from diloco.protocol.telemetry import Evaluation
from diloco.store.base import LISTED, LocalStore, ObjectInfo
from diloco.store.open import open_store
from tests.diloco.bucket_world import StillClock, World, who


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(LocalStore(tmp_path / "run"))


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 2, 7, 8, 1000])
@pytest.mark.parametrize("hint", [1, 2, 9, 2000])
def test_the_last_of_a_run_is_found_from_any_guess(last: int, hint: int) -> None:
    asked: list[int] = []

    def exists(n: int) -> bool:
        asked.append(n)
        return 1 <= n <= last

    assert last_that(exists, hint=hint) == last
    assert len(asked) <= 30
    assert min(asked) >= 1


class CountingStore(LocalStore):
    """Counts, by thread, and remembers what was listed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed: list[str] = []
        self.got: list[str] = []
        self.threads: set[int] = set()

    def list(self, prefix: str, *, limit: int = LISTED) -> list[ObjectInfo]:
        self.listed.append(prefix)
        return super().list(prefix, limit=limit)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        self.got.append(key)
        self.threads.add(threading.get_ident())
        return super().get(key, limit=limit)


def test_only_what_is_shown_is_read(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "run")
    world = World(store)
    for number in range(1, 101):
        world.round(number, 0, 1)
    for replica in (0, 1):
        world.beat(replica, round=101, state="left")
        for n in range(1, 101):
            world.report(replica, n, n, {"round": n, "weights_digest": "same"})
    store.listed.clear()
    store.got.clear()
    picture = inspect(store, scope=Scope(newest=10), clock=StillClock())
    assert [shown.round for shown in picture.rounds] == list(range(91, 101))
    assert len(picture.reports) == 20
    assert sorted(store.listed) == sorted(
        ["members/", "checkpoints/", "final/", "state/"]
        + [keys.round_dir(number) for number in range(91, 102)]
    )
    segments = [key for key in store.got if key.startswith("telemetry/")]
    assert len(segments) == 2 * 16
    assert len(store.got) < 80
    assert len(store.threads) > 1


def test_a_last_beat_is_read_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "run")
    world = World(store)
    world.beat(0, state="left")
    world.beat(1)
    inspect(store, clock=StillClock())
    beats = [key for key in store.got if key.startswith(keys.MEMBERS)]
    assert sorted(beats) == sorted([beat_of(0), beat_of(1), beat_of(1)])


def beat_of(replica: int) -> str:
    return keys.beat(replica, who(replica).incarnation)


def test_rounds_can_be_chosen(world: World) -> None:
    for number in range(1, 31):
        world.round(number, 0)

    def shown(**scope: Any) -> list[int]:
        picture = inspect(world.store, scope=Scope(**scope), clock=StillClock())
        assert picture.newest is not None and picture.newest.round == 30
        return [shown.round for shown in picture.rounds]

    assert shown(first=3, last=5) == [3, 4, 5]
    assert shown(first=29) == [29, 30]
    assert shown(first=40) == []
    assert shown(newest=2) == [29, 30]


def test_sizes_are_of_what_was_looked_at_or_of_everything(world: World) -> None:
    world.round(1, 0)
    world.round(2, 0, 1)
    world.report(0, 1, 2)
    some = inspect(world.store, scope=Scope(newest=1), clock=StillClock())
    assert (some.sizes["payloads"].objects, some.sizes["payloads"].bytes) == (2, 2000)
    assert "telemetry" not in some.sizes
    whole = inspect(world.store, scope=Scope(newest=1, whole=True), clock=StillClock())
    assert whole.sizes["payloads"].objects == 3
    assert whole.sizes["telemetry"].objects == whole.sizes["settings"].objects == 1
    assert sum(s.objects for s in whole.sizes.values()) == len(world.store.list(""))


def test_with_overlap_several_rounds_are_open(tmp_path: Path) -> None:
    world = World(LocalStore(tmp_path / "run"), sync_every=10, num_fragments=5, overlap_steps=4)
    for number in (1, 2, 3):
        world.contribute(number, 0)
    picture = inspect(world.store, clock=StillClock())
    assert [(shown.round, shown.fragment) for shown in picture.rounds] == [(1, 0), (2, 0), (3, 0)]


# -- the command -----------------------------------------------------------------------------------


def a_run(world: World) -> None:
    world.checkpoint(0)
    world.round(1, 0, 1)
    world.round(2, 0, 1)
    for replica in (0, 1):
        world.beat(replica, round=3, state="left", host="laptop", device="cpu")
        reports = [
            {"round": n, "phases": {"compute": 3.0, "wait": 1.0}, "weights_digest": f"{n}"}
            for n in (1, 2)
        ]
        world.report(replica, 1, 2, *reports)
    world.report(0, 2, 3, evaluations=(Evaluation(round=2, loss=1.5, tokens=9, wall_s=0.0),))


def test_the_command_shows_it_all(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(world)
    assert main([str(world.store.uri)], clock=StillClock()) == 0
    text = capsys.readouterr().out
    assert "2 of 50 rounds committed, 0 void, 600 tokens" in text
    assert "  num_replicas  3\n" in text and "sync_every" not in text
    assert "  replica 0   ##\n  replica 1   ##\n  # included" in text
    assert "25.0%" in text
    assert "round 2: 1.5000" in text
    assert "health: 1 problem\n  ! round 3 has no contribution yet, all replicas have ended" in text


def test_all_settings_if_asked(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([world.store.uri, "--settings"], clock=StillClock()) == 0
    text = capsys.readouterr().out
    assert "sync_every" in text and "heartbeat_timeout_s" in text
    assert world.document.fingerprint[:16] in text


def test_json_says_the_same(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(world)
    world.round(3, 0, loss=float("nan"))
    assert main([world.store.uri, "--json", "--rounds", "2-"], clock=StillClock()) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["document"]["fingerprint"] == world.document.fingerprint
    assert [shown["round"] for shown in body["rounds"]] == [2, 3]
    assert body["rounds"][0]["marks"] == {"0": "#", "1": "#"}
    assert body["rounds"][1]["commit"]["loss"] is None
    assert body["reports"][0]["report"]["phases"]["wait"] == 1.0
    assert {"text": "round 3: expected a finite loss, found nan", "problem": True} in (
        body["findings"]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a run at {uri}, found no group.json"),
        (b"hello", "group.json: expected JSON"),
        (b'{"format": "other"}', "expected format 'archipelago.group', found 'other'"),
        (b'{"format": "archipelago.group", "protocol": 1}', "speaks protocol 2, found protocol 1"),
    ],
)
def test_what_is_no_run_has_status_2(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path)
    if content is not None:
        store.put(keys.GROUP, content)
    assert main([str(tmp_path)]) == 2
    assert message.format(uri=store.uri) in capsys.readouterr().err
    with pytest.raises(NotARun):
        inspect(store)


@pytest.mark.parametrize(
    "options", [["--rounds", "5-3"], ["--rounds", "0"], ["--rounds", "x"], ["--last", "0"]]
)
def test_bad_options_have_status_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["/nowhere", *options])
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_a_uri_that_nothing_opens_has_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope://bucket/run"]) == 2
    assert "nope" in capsys.readouterr().err


def test_watching_ends_with_the_run(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(world)
    looks: list[float] = []

    def meanwhile() -> None:
        looks.append(1)
        world.round(2 + len(looks), 0)
        if len(looks) == 2:
            world.finish(4)

    assert main([world.store.uri, "--watch"], clock=StillClock(meanwhile)) == 0
    screens = capsys.readouterr().out.split("\033[H\033[2J")[1:]
    assert ["final: completed" in screen for screen in screens] == [False, False, True]


def test_it_needs_no_torch() -> None:
    code = "import sys, diloco.inspect; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_on_a_real_object_store(s3_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(open_store(s3_uri))
    a_run(world)
    assert main([s3_uri, "--sizes"], clock=StillClock()) == 0
    text = capsys.readouterr().out
    assert "2 of 50 rounds committed" in text
    assert "  replica 0   ##" in text
    assert "telemetry" in text
    assert main([s3_uri + "-not-there"], clock=StillClock()) == 2
