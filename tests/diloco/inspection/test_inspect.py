"""Reading a run from its bucket, and the command that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco.inspect import inspect, main
from diloco.inspection.reader import find_last
from diloco.inspection.reading import NotARun, Scope
from diloco.protocol import keys
from diloco.protocol.packed_rounds import BLOCK
from diloco.protocol.telemetry import Evaluation
from diloco.store.base import LISTED, LocalStore, ObjectInfo
from diloco.store.open import open_store
from diloco.training.round_packs import pack_rounds
from tests.diloco.bucket_harness import Harness, who
from tests.diloco.clocks import ManualClock


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(LocalStore(tmp_path / "run"))


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 2, 7, 8, 1000])
@pytest.mark.parametrize("hint", [1, 2, 9, 2000])
def test_the_last_number_is_found_from_any_hint(last: int, hint: int) -> None:
    requested: list[int] = []

    def exists(n: int) -> bool:
        requested.append(n)
        return 1 <= n <= last

    assert find_last(exists, hint=hint) == last
    assert len(requested) <= 30
    assert min(requested) >= 1


class CountingStore(LocalStore):
    """Counts requests, from several threads, and records the listed prefixes."""

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


def test_only_shown_objects_are_read(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "run")
    harness = Harness(store)
    for number in range(1, 101):
        harness.round(number, 0, 1)
    for replica in (0, 1):
        harness.beat(replica, round=101, state="left")
        for n in range(1, 101):
            harness.report(replica, n, n, {"round": n, "weights_digest": "same"})
    store.listed.clear()
    store.got.clear()
    picture = inspect(store, scope=Scope(newest=10), clock=ManualClock())
    assert [shown.round for shown in picture.rounds] == list(range(91, 101))
    assert len(picture.reports) == 20
    assert sorted(store.listed) == sorted(
        ["members/", "checkpoints/", "final/", "state/"]
        + [keys.round_dir(number) for number in range(91, 102)]
    )
    segments = [key for key in store.got if key.startswith("telemetry/")]
    assert len([key for key in segments if key.endswith(".json")]) == 2 * 16
    assert len(segments) <= 2 * 20, "one pack for each missing segment"
    assert len(store.got) < 90
    assert len(store.threads) > 1


def test_packed_rounds_are_shown_as_before(harness: Harness) -> None:
    store, scope = harness.store, Scope(first=1, last=2 * BLOCK)
    for number in range(1, 2 * BLOCK + 3):
        harness.contribute(number, 0, 1, 2, payload=False)
        harness.plan(number, 0, 1)
        harness.commit(number, 0, 1)

    def shown() -> list[tuple[object, ...]]:
        picture = inspect(store, scope=scope, clock=ManualClock())
        return [(r.round, r.plan, r.commit, r.arrived) for r in picture.rounds]

    before = shown()
    for number in (0, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2):
        harness.checkpoint(number)
        pack_rounds(store)
    assert not store.list(keys.contributions(1)) and not store.list(keys.contributions(2 * BLOCK))
    assert shown() == before
    store.put(keys.round_pack(1), b"no pack")
    picture = inspect(store, scope=scope, clock=ManualClock())
    assert [bad.key for bad in picture.unreadable] == [keys.round_pack(1)]
    assert len(picture.rounds) == 2 * BLOCK


def test_a_final_heartbeat_is_read_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path / "run")
    harness = Harness(store)
    harness.beat(0, state="left")
    harness.beat(1)
    inspect(store, clock=ManualClock())
    beats = [key for key in store.got if key.startswith(keys.MEMBERS)]
    assert sorted(beats) == sorted([beat_of(0), beat_of(1), beat_of(1)])


def beat_of(replica: int) -> str:
    return keys.beat(replica, who(replica).incarnation)


def test_rounds_can_be_chosen(harness: Harness) -> None:
    for number in range(1, 31):
        harness.round(number, 0)

    def shown(**scope: Any) -> list[int]:
        picture = inspect(harness.store, scope=Scope(**scope), clock=ManualClock())
        assert picture.newest is not None and picture.newest.round == 30
        return [shown.round for shown in picture.rounds]

    assert shown(first=3, last=5) == [3, 4, 5]
    assert shown(first=29) == [29, 30]
    assert shown(first=40) == []
    assert shown(newest=2) == [29, 30]


def test_sizes_cover_the_listed_objects_or_all(harness: Harness) -> None:
    harness.round(1, 0)
    harness.round(2, 0, 1)
    harness.report(0, 1, 2)
    some = inspect(harness.store, scope=Scope(newest=1), clock=ManualClock())
    assert (some.sizes["payloads"].objects, some.sizes["payloads"].bytes) == (2, 2000)
    assert "telemetry" not in some.sizes
    whole = inspect(harness.store, scope=Scope(newest=1, whole=True), clock=ManualClock())
    assert whole.sizes["payloads"].objects == 3
    assert whole.sizes["telemetry"].objects == whole.sizes["settings"].objects == 1
    assert sum(s.objects for s in whole.sizes.values()) == len(harness.store.list(""))


def test_with_overlap_several_rounds_are_in_flight(tmp_path: Path) -> None:
    harness = Harness(LocalStore(tmp_path / "run"), sync_every=10, num_fragments=5, overlap_steps=4)
    for number in (1, 2, 3):
        harness.contribute(number, 0)
    picture = inspect(harness.store, clock=ManualClock())
    assert [(shown.round, shown.fragment) for shown in picture.rounds] == [(1, 0), (2, 0), (3, 0)]


# -- the command -----------------------------------------------------------------------------------


def a_run(harness: Harness) -> None:
    harness.checkpoint(0)
    harness.round(1, 0, 1)
    harness.round(2, 0, 1)
    for replica in (0, 1):
        harness.beat(replica, round=3, state="left", host="laptop", device="cpu")
        reports = [
            {"round": n, "phases": {"compute": 3.0, "wait": 1.0}, "weights_digest": f"{n}"}
            for n in (1, 2)
        ]
        harness.report(replica, 1, 2, *reports)
    harness.report(0, 2, 3, evaluations=(Evaluation(round=2, loss=1.5, tokens=9, wall_s=0.0),))


def test_the_command_shows_all_sections(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(harness)
    assert main([str(harness.store.uri)], clock=ManualClock()) == 0
    text = capsys.readouterr().out
    assert "2 of 50 rounds committed, 0 void, 600 tokens" in text
    assert "  num_replicas  3\n" in text and "sync_every" not in text
    assert "  replica 0   ##\n  replica 1   ##\n  # included" in text
    assert "25.0%" in text
    assert "round 2: 1.5000" in text
    assert "health: 1 problem\n  ! round 3 has no contribution yet, all replicas have ended" in text


def test_the_command_can_show_all_settings(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([harness.store.uri, "--settings"], clock=ManualClock()) == 0
    text = capsys.readouterr().out
    assert "sync_every" in text and "heartbeat_timeout_s" in text
    assert harness.document.fingerprint[:16] in text


def test_the_json_output_has_the_same_content(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(harness)
    harness.round(3, 0, loss=float("nan"))
    assert main([harness.store.uri, "--json", "--rounds", "2-"], clock=ManualClock()) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["document"]["fingerprint"] == harness.document.fingerprint
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
        (
            b'{"format": "archipelago.group", "protocol": 2}',
            "expected protocol 3, the version of this library, found protocol 2",
        ),
    ],
)
def test_a_prefix_without_a_run_has_status_2(
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


def test_an_unknown_uri_has_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope://bucket/run"]) == 2
    assert "nope" in capsys.readouterr().err


def test_watching_ends_with_the_run(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(harness)
    looks: list[float] = []

    def meanwhile() -> None:
        looks.append(1)
        harness.round(2 + len(looks), 0)
        if len(looks) == 2:
            harness.finish(4)

    assert main([harness.store.uri, "--watch"], clock=ManualClock(meanwhile)) == 0
    screens = capsys.readouterr().out.split("\033[H\033[2J")[1:]
    assert ["final: completed" in screen for screen in screens] == [False, False, True]


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, diloco.inspect; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_on_a_real_object_store(s3_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    harness = Harness(open_store(s3_uri))
    a_run(harness)
    assert main([s3_uri, "--sizes"], clock=ManualClock()) == 0
    text = capsys.readouterr().out
    assert "2 of 50 rounds committed" in text
    assert "  replica 0   ##" in text
    assert "telemetry" in text
    assert main([s3_uri + "-not-there"], clock=ManualClock()) == 2
