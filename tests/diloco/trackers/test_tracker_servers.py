"""The trackers against the real servers and file formats: MLflow, trackio and wandb's offline
files.

The servers run in an environment of their own (``requirements/tracker-servers.txt``), which uv
creates."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.trackers.base import MirroredRun, Tracker, TrackerRow
from diloco.trackers.mlflow import MLflowTracker
from diloco.trackers.trackio import TrackioTracker
from diloco.trackers.wandb import WandbTracker
from tests.emulators.serving import free_ports
from tests.tracker_servers import running, tracker_python

pytestmark = [pytest.mark.slow(minutes=2), pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[3]
RUN = MirroredRun(
    id="6f0c9b1c-7a31-4a52-9f0e-3f2f9a3f8b11",
    name="Small/Llama",
    started_s=1.9e9,
    config={"settings.inner_lr": 3e-3, "workload.kind": "byte_gpt"},
    tags=("nightly",),
)
ROWS = tuple(
    TrackerRow(
        number=n,
        owner="replica/1" if n % 2 else "",
        step=n,
        wall_s=1.9e9 + n,
        values={"loss": {3: math.nan, 4: math.inf}.get(n, 1 / (1 + n)), "lr": 1e-3},
    )
    for n in range(12)
)


@pytest.fixture(scope="module")
def python() -> str:
    return tracker_python()


def deliver_with_repeats(tracker: Tracker) -> dict[str, Any]:
    """Every call twice with the same state, as after a worker that was killed."""
    state: dict[str, Any] = {}
    for _ in range(2):
        started = tracker.start(RUN, state)
    for rows in (ROWS[:7], ROWS[7:]):
        for _ in range(2):
            after = tracker.log(RUN, rows, started)
        started = after
    return tracker.finish(RUN, "succeeded", started)


def expected() -> dict[tuple[str, int], float]:
    return {(name, row.step): v for row in ROWS for name, v in row.named_values().items()}


def assert_same(found: list[tuple[str, int, float]]) -> None:
    by_place = {(name, step): value for name, step, value in found}
    assert len(by_place) == len(found), "a point is there twice"
    assert by_place.keys() == expected().keys()
    for place, value in expected().items():
        assert by_place[place] == value or (math.isnan(value) and math.isnan(by_place[place]))


def test_mlflow_server(python: str, tmp_path: Path) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/store.db"]
    # Without it, eight processes for evaluation jobs start, which outlive the server.
    variables = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with running(command, f"{url}/health", tmp_path / "log", **variables):
        tracker = MLflowTracker(url, "islands")
        state = deliver_with_repeats(tracker)
        assert tracker.start(RUN, {}) == state, "the run was created twice"
        request = urllib.request.Request(f"{url}/api/2.0/mlflow/runs/get?run_id={state['run_id']}")
        with urllib.request.urlopen(request) as response:
            info = json.load(response)["run"]
    assert info["info"]["status"] == "FINISHED"
    assert {p["key"]: p["value"] for p in info["data"]["params"]}["workload.kind"] == "byte_gpt"
    with sqlite3.connect(tmp_path / "store.db") as store:
        rows = store.execute("SELECT key, step, value, is_nan FROM metrics").fetchall()
    # MLflow stores infinity as the largest double.
    values = [
        (key, step, math.nan if nan else math.inf if value > 1e308 else value)
        for key, step, value, nan in rows
    ]
    assert_same(values)


def test_trackio_server(python: str, tmp_path: Path) -> None:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    program = str(Path(python).with_name("trackio"))
    variables = {
        "TRACKIO_DIR": str(tmp_path),
        "TRACKIO_WRITE_TOKEN": "w-123",
        "GRADIO_SERVER_PORT": str(port),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "BROWSER": "true",
    }
    with running([program, "show", "--host", "127.0.0.1"], url, tmp_path / "log", **variables):
        tracker = TrackioTracker(url, "islands", secrets={"TRACKIO_WRITE_TOKEN": "w-123"})
        deliver_with_repeats(tracker)
    with sqlite3.connect(tmp_path / "islands.db") as store:
        rows = store.execute("SELECT step, metrics FROM metrics").fetchall()
    assert_same(
        [(name, step, float(v)) for step, text in rows for name, v in json.loads(text).items()]
    )


def test_wandb_offline_files(python: str, tmp_path: Path) -> None:
    tracker = WandbTracker("islands", folder=tmp_path, offline=True, python=python)
    deliver_with_repeats(tracker)
    files = sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.parts[-4])
    assert [path.parts[-4] for path in files] == ["0000000000", "0000000007", "end"]
    program = (
        "import json, sys\n"
        "from wandb.proto import wandb_internal_pb2 as pb\n"
        "for line in sys.stdin:\n"
        "    record = pb.Record.FromString(bytes.fromhex(line))\n"
        "    if record.WhichOneof('record_type') == 'history':\n"
        "        items = {i.key or '/'.join(i.nested_key): i.value_json\n"
        "            for i in record.history.item}\n"
        "        print(json.dumps(items))\n"
    )
    records = "\n".join(record.hex() for path in files for record in log_records(path.read_bytes()))
    done = subprocess.run(
        [python, "-c", program], input=records, capture_output=True, text=True, check=True
    )
    found = []
    for line in done.stdout.splitlines():
        items = {name: json.loads(text) for name, text in json.loads(line).items()}
        axis = next(name for name in items if re.fullmatch(r"round|replica/\d+/step", name))
        found += [
            (name, items[axis], float(value))
            for name, value in items.items()
            if name != axis and not name.startswith("_")
        ]
    assert_same(found)


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a wandb file: a header of 7 bytes, then LevelDB's log format
    (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    block, position, parts = 32768, 7, b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""
