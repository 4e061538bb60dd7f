"""Every command of the client against a live server."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archipelago import terminal, write_commands
from archipelago.cli import main, parser
from archipelago.client import Client
from archipelago.documents import EXAMPLE
from tests.browser import seed
from tests.browser.seed_prices import priced
from tests.matrix import matrix

pytestmark = pytest.mark.django_db(transaction=True)

Call = Callable[..., Any]
DOCUMENT = 'name = "Sent"\n[settings]\nwarmup_steps = 5\n[[pools]]\ncount = 2\n'


@pytest.fixture
def run(signed_in: str) -> Any:
    return seed.run(seed.user("owner", "operator"), committed=3, replicas=2, name="First run")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(DOCUMENT)
    return path


def test_every_command_is_documented() -> None:
    (commands,) = parser()._subparsers._group_actions  # type: ignore[union-attr]
    reported = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name, command in commands.choices.items():  # type: ignore[union-attr]
        assert f"archipelago {name}" in reported, name
        for action in command._actions:
            for option in action.option_strings:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in reported or f" {option}" in reported, (name, option)


def test_ls(call: Call, run: Any) -> None:
    seed.run(run.owner, state="failed", name="Second", committed=0, age_s=60)
    result = call("ls")
    head, first, second = result.out.splitlines()
    assert head.split()[:4] == ["ID", "STATE", "NAME", "OWNER"]
    assert {first.split()[0], second.split()[0]} == {
        str(pk)[:8] for pk in type(run).objects.values_list("pk", flat=True)
    }
    only = call("ls", "--state", "failed", "--json")
    assert [row["name"] for row in json.loads(only.out)] == ["Second"]
    assert call("ls", "--name", "nothing").err == "no runs match\n"
    assert len(call("ls", "--all").out.splitlines()) == 3
    assert len(call("ls", "-n", "1").out.splitlines()) == 2


def test_show_finds_a_run_by_id_prefix_name_or_last(call: Call, run: Any) -> None:
    for name in (str(run.pk), str(run.pk)[:6], "First run", "last"):
        result = call("show", name)
        assert result.code == 0, result.err
        assert result.out.startswith(f"First run  {run.pk}\n")
        assert "3 of 20" in result.out
    for wrong, why in (("zz", "expected 4 characters"), ("zzzz", "found 'zzzz'")):
        result = call("show", wrong)
        assert result.code == 5
        assert why in result.err
    assert json.loads(call("show", "last", "--json").out)["settings"]["sync_every"] == 40


def test_block_indents_continuation_lines() -> None:
    shown = terminal.block("first\nsecond \x1b[2J\r\nthird\n")
    assert shown == "first\n    second \ufffd[2J\n    third"


def test_version_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("archipelago ")


def test_names_cannot_send_escape_sequences(call: Call, run: Any) -> None:
    type(run).objects.update(name="\x1b[2Jevil\nrun")
    for command in (("ls",), ("show", "last"), ("watch", "last")):
        type(run).objects.update(state="succeeded")
        out = call(*command).out
        assert "\x1b" not in out
        assert "�[2Jevil�run" in out


def test_plan_and_submit(call: Call, run: Any, file: Path) -> None:
    result = call("plan", str(file), "--offline")
    assert result.code == 0, result.err
    assert "traffic per round" in result.out
    result = call("submit", str(file), "-q", "--key", "one")
    assert result.code == 0, result.err
    created = type(run).objects.get(pk=result.out.strip())
    assert (created.name, created.owner.username, created.submit_key) == ("Sent", "owner", "one")
    assert created.group_settings["num_replicas"] == 2
    assert call("submit", str(file), "-q", "--key", "one").out.strip() == str(created.pk)
    assert type(run).objects.count() == 2


@matrix(
    ("text", "why"),
    [
        ("name = 'x'\n[[pools]]\ncount = 0\n", "pools.0.count: expected 1 or more, found 0"),
        ("name = 'x'\n", "pools: expected a value, found none"),
        (DOCUMENT + "[settings2]\n", "settings2: expected no such field, found {}"),
        (DOCUMENT.replace("warmup_steps", "warmup"), "settings.warmup: is not a group setting"),
        (DOCUMENT.replace("= 5", "= -5"), "settings.warmup_steps: expected 0 or more, found -5"),
        (
            DOCUMENT.replace("= 5", "= 5\nmean_codec = 'int8'\nreduce_plan = 'gather'"),
            "settings.mean_codec: expected full",
        ),
        (DOCUMENT + "hardware = 'H900'\n", "pools.0.hardware: expected one of"),
        (DOCUMENT + "credential = 'gone'\n", "expected a credential for local (none yet)"),
        ("name = ", "run.toml: "),
        (DOCUMENT + "[workload]\nkind = 'x'\n", "workload.kind: expected one of byte_gpt"),
        (DOCUMENT + "[workload]\nsize = 'x'\n", "workload.size: expected one of"),
        ("name = 1979-05-27\n", "run.toml: expected text, numbers"),
    ],
    fast=3,
)
def test_invalid_documents_name_the_field(
    call: Call, run: Any, file: Path, text: str, why: str
) -> None:
    file.write_text(text)
    for command in ("submit", "plan"):
        result = call(command, str(file))
        assert result.code == 6
        assert why in result.err
        assert result.out == "" or command == "plan"
    assert type(run).objects.count() == 1


def test_the_example_document_can_be_submitted(call: Call, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    assert call("example").out == EXAMPLE
    path.write_text(EXAMPLE)
    result = call("submit", str(path), "-q")
    assert result.code == 0, result.err


def test_missing_document_file(call: Call, run: Any) -> None:
    result = call("submit", "nowhere.toml")
    assert (result.code, result.err) == (
        6,
        "archipelago: nowhere.toml: No such file or directory\n",
    )


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("cancelled", 1)])
def test_watch_exits_when_the_run_ends(call: Call, run: Any, state: str, code: int) -> None:
    seen: list[int] = []

    def ends(_: float) -> None:
        seen.append(1)
        type(run).objects.filter(pk=run.pk).update(state=state, state_reason="because")

    monkey = pytest.MonkeyPatch()
    monkey.setattr(Client.__init__, "__kwdefaults__", {"timeout_s": 30.0, "sleep": ends})
    try:
        result = call("watch", "last")
    finally:
        monkey.undo()
    assert seen == [1]
    assert result.code == code
    assert "running   ███················· 3/20" in result.out
    assert result.out.endswith(f"{state}: because\n")


def test_logs_and_follow(call: Call, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.utils import timezone

    from runs.models import LogLine

    replica = run.replicas.get(number=1)
    assert len(call("logs", "last").out.splitlines()) == 6
    assert len(call("logs", "last", "--replica", "1", "-n", "2").out.splitlines()) == 2
    assert "upload retried" in call("logs", "last", "--level", "warning").out
    assert "data shards" in call("logs", "last", "--grep", "DATA SHARDS").out
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 1:
            return
        LogLine.objects.create(
            replica=replica, incarnation="x", at=timezone.now(), level="info", message="the end"
        )
        type(run).objects.update(state="succeeded")

    monkeypatch.setattr(Client.__init__, "__kwdefaults__", {"timeout_s": 30.0, "sleep": wait})
    result = call("logs", "-f", "last")
    assert result.code == 0
    assert len(result.out.splitlines()) == 7
    assert result.out.endswith("the end\n")


def test_events(call: Call, run: Any) -> None:
    result = call("events", "last")
    assert result.code == 0
    assert len(result.out.splitlines()) == run.events.count()


def test_export(run: Any, tmp_path: Path, capsysbinary: Any) -> None:
    path = tmp_path / "points.csv"
    code = main(["export", "last", "points", "-o", str(path)])
    assert code == 0
    rows = list(csv.DictReader(path.open()))
    assert {row["series"] for row in rows} >= {"loss", "eval_loss"}
    assert list(tmp_path.glob(".*.part")) == []
    capsysbinary.readouterr()
    assert main(["export", "last", "rounds", "--format", "jsonl", "-o", "-"]) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert [json.loads(line)["round"] for line in lines[:3]] == [1, 2, 3]


def test_export_of_runs(run: Any, tmp_path: Path, capsysbinary: Any) -> None:
    path = tmp_path / "runs.csv"
    assert main(["export-runs", "-q", "state:running", "-o", str(path)]) == 0
    assert [row["id"] for row in csv.DictReader(path.open())] == [str(run.pk)]
    capsysbinary.readouterr()
    assert main(["export-runs", "-q", "state:failed", "--format", "jsonl", "-o", "-"]) == 0
    assert capsysbinary.readouterr().out == b""


def test_scale_restart_and_stop(call: Call, run: Any) -> None:
    result = call("scale", "last", "3")
    assert (result.code, result.out.split(": ")[1]) == (0, "3 wanted, 1 more\n")
    assert call("restart", "last", "0").out == "replica 0: restarting\n"
    assert call("stop", "last", "--replica", "1", "--force").out == "replica 1: draining\n"
    assert call("stop", "last", "--replica", "1").out == "replica 1: draining already\n"
    assert call("stop", "last", "--reason", "enough").out == "First run: stopping\n"
    assert call("stop", "last").out == "First run: stopping already\n"
    run.refresh_from_db()
    assert run.state_reason == "enough"
    result = call("restart", "last", "0")
    assert result.code == 7
    assert "cannot become restarting" in result.err
    assert call("scale", "last", "3").code == 6
    assert call("stop", "last", "--replica", "77").code == 5


def test_stop_of_all_runs_that_match(call: Call, run: Any, monkeypatch: Any) -> None:
    owner, other = run.owner, seed.user("oscar", "operator")
    seed.run(owner, name="Second", committed=1)
    seed.run(owner, name="Over", state="failed", committed=1)
    seed.run(other, name="Foreign", committed=1)
    assert call("stop-matching", "name:nothing").out == "No active run matches.\n"
    result = call("stop-matching", "is:active", "--count", "2")
    assert result.code == 6
    assert "expected 3, the number of selected active runs, found 2" in result.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n"))
    result = call("stop-matching", "is:active", "--reason", "enough")
    assert result.out == "Second: stopping\nFirst run: stopping\n"
    assert "Enter the number of runs to stop: 3" in result.err
    assert "Foreign: " in result.err
    assert result.code == 1
    monkeypatch.setattr(write_commands, "MOST_MATCHING", 1)
    assert "expected at most 1 runs" in call("stop-matching", "is:active").err


def test_pause_save_resume_and_stop_by_force(call: Call, run: Any) -> None:
    assert call("save", "last").out == "First run: running\n"
    assert call("pause", "last").out == "First run: pausing\n"
    assert call("pause", "last").out == "First run: pausing already\n"
    result = call("resume", "last")
    assert (result.code, result.err) == (7, "archipelago: its machines are still being released\n")
    assert call("stop", "last", "--force").out == "First run: stopping\n"


def test_describe_and_query(call: Call, run: Any) -> None:
    assert call("describe", "last").code == 2
    result = call("describe", "last", "--notes", "why", "--tag", "a", "--tag", "b")
    assert result.out == "First run: saved\n"
    assert "First run" in call("ls", "-q", "tag:a").out
    assert call("ls", "-q", "tag:c").err == "no runs match\n"
    assert call("ls", "-q", "loss<").code == 6
    priced(run, 4.0)
    head, line = call("ls", "-q", "rate>=4").out.splitlines()
    assert "$/H" in head.split()
    assert f"${4 * run.replicas.count()}.00" in line.split()
    assert call("ls", "-q", "rate<4").err == "no runs match\n"
    assert call("ls", "-q", "cost>100").err == "no runs match\n"
    run.refresh_from_db()
    assert (run.notes, run.tags) == ("why", ["a", "b"])
    assert call("describe", "last", "--tag", "").out == "First run: saved\n"
    run.refresh_from_db()
    assert (run.notes, run.tags) == ("why", [])


def test_delete_requires_the_name(call: Call, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    type(run).objects.update(state="failed")
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    result = call("delete", "last")
    assert result.code == 7
    assert "expected the name of the run, 'First run', found 'no'" in result.err
    assert call("delete", "last", "--name", "First run").code == 0
    run.refresh_from_db()
    assert run.delete_requested_at is not None


def test_delete_with_objects_lists_them_first(call: Call, run: Any, tmp_path: Path) -> None:
    from diloco.protocol.ownership import mark
    from diloco.store.base import LocalStore

    store = LocalStore(tmp_path / "run")
    mark(store, str(run.pk))
    store.put("control/00000001.json", b"x")
    store.put("notes\x1b.txt", b"mine")
    type(run).objects.update(state="failed", rendezvous=store.uri)
    result = call("delete", "last", "--objects", "--name", "First run")
    assert result.code == 0
    assert "Deletes 2 objects, " in result.err
    assert "Keeps 1 objects that do not belong to the run:\n  notes" in result.err
    assert "\x1b" not in result.err


def test_alerts(call: Call, run: Any) -> None:
    from django.utils import timezone

    assert call("alerts", "last").code == 0
    now = timezone.now()
    run.alerts.create(
        kind="stalled", level="error", message="no commit", first_at=now, opened_at=now, times=2
    )
    result = call("alerts", "last")
    assert result.code == 1
    assert "open    Stalled: no commit (2 times)" in result.out

    result = call("alerts", "last", "--acknowledge")
    assert (result.code, result.err) == (0, "1 acknowledged\n")
    assert result.out == "acknowledged: Stalled: no commit\n"
    result = call("alerts", "last")
    assert result.code == 0
    assert ", acknowledged by " in result.out
    assert call("alerts", "last", "--acknowledge").err == "0 acknowledged\n"
    assert "expected RUN" in call("alerts", "--acknowledge").err
    assert "found both" in call("alerts", "last", "--acknowledge", "--json").err


def test_the_document_of_a_run_creates_a_clone(call: Call, run: Any, tmp_path: Path) -> None:
    result = call("document", "last")
    document = json.loads(result.out) | {"rendezvous": ""}
    path = tmp_path / "clone.json"
    path.write_text(json.dumps(document))
    created = call("submit", str(path), "-q")
    assert created.code == 0, created.err
    assert type(run).objects.get(pk=created.out.strip()).group_settings == run.group_settings
    result = call("document", "last", "--fork")
    assert result.code == 7
    assert "expected a run with a checkpoint to fork from, found none" in result.err


def test_code_folder_next_to_the_document_is_uploaded(call: Call, run: Any, tmp_path: Path) -> None:
    from runs.models import Archive

    folder = tmp_path / "code"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "mine.pyc").write_bytes(b"x")
    (folder / "mine.py").write_text("def make(): ...\n")
    path = tmp_path / "own.toml"
    path.write_text(
        DOCUMENT + '[workload]\nkind = "custom"\nfunction = "mine:make"\narchive = "code"\n'
    )
    for _ in range(2):
        created = call("submit", str(path), "-q")
        assert created.code == 0, created.err
    archive = Archive.objects.get()
    assert type(run).objects.get(pk=created.out.strip()).archive_id == archive.pk
    (folder / "mine.py").unlink()
    result = call("plan", str(path))
    assert result.code == 6
    assert "archive: expected Python files, found none" in result.err
    path.write_text(path.read_text().replace('"code"', '"gone.zip"'))
    assert "gone.zip: No such file" in call("submit", str(path)).err


def test_scale_requires_a_pool_if_the_run_has_several(call: Call, run: Any) -> None:
    from runs.models import ReplicaPool

    ReplicaPool.objects.create(run=run, backend="local", hardware="cpu", count=0)
    result = call("scale", "last", "3")
    assert result.code == 2
    assert "expected --pool with one of" in result.err


def test_viewers_get_a_permission_error(
    call: Call, run: Any, token_of: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIPELAGO_TOKEN", token_of("watcher", "viewer"))
    result = call("stop", "last")
    assert result.code == 4
    assert "found watcher, a viewer" in result.err


def test_backends_and_settings(call: Call, run: Any) -> None:
    assert "local        cpu" in call("backends").out
    assert "sync_every = 50  (steps)" in call("settings").out
    assert json.loads(call("settings", "--json").out)[0]["name"] == "sync_every"


@pytest.mark.parametrize(
    "arguments", [(), ("nonsense",), ("ls", "-n", "0"), ("watch", "x", "--every", "0")]
)
def test_invalid_command_lines(call: Call, arguments: tuple[str, ...]) -> None:
    assert call(*arguments).code == 2


def test_ctrl_c_does_not_stop_the_run(
    call: Call, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client.__init__, "__kwdefaults__", {"timeout_s": 30.0, "sleep": interrupt})
    result = call("watch", "last")
    assert result.code == 130
    assert "the run continues" in result.err
    run.refresh_from_db()
    assert run.state == "running"


def test_findings_and_activity(call: Call, run: Any, tmp_path: Path) -> None:
    from django.utils import timezone

    now = timezone.now()
    run.alerts.create(kind="nan", level="error", message="replica 0", first_at=now, opened_at=now)
    result = call("findings", "last")
    assert result.code == 1
    assert "error    Loss is NaN (replica 0)" in result.out
    assert json.loads(call("findings", "last", "--json").out)[0]["kind"] == "nan"
    listed = call("activity", "last", "--source", "alert").out
    assert "alert  Loss is NaN: replica 0 [open]" in listed
    assert len(json.loads(call("activity", "last", "-n", "2", "--json").out)) == 2


def test_matching_log_lines_are_written_to_a_file(call: Call, run: Any, tmp_path: Path) -> None:
    target = tmp_path / "run.log"
    result = call("logs", "last", "--replica", "0", "-o", str(target))
    assert result.code == 0, result.err
    assert "replica 0 " in target.read_text()
    assert "replica 1 " not in target.read_text()
    rows = call("logs", "last", "-o", "-", "--format", "jsonl").out.splitlines()
    assert {json.loads(row)["replica"] for row in rows} > {0}
    refused = call("logs", "last", "-o", str(target), "--level", "info")
    assert refused.code != 0
    assert "expected --level warning or error" in refused.err


def test_totals_of_runs(call: Call, run: Any) -> None:
    result = call("ls", "--totals", "--owner", "owner")
    assert result.code == 0, result.err
    figures = dict(line.rsplit(maxsplit=1) for line in result.out.splitlines())
    assert {name.strip(): text for name, text in figures.items()} == {
        "runs": "1",
        "active": "1",
        "GPUs in use": "0",
        "$/h": "–",
        "spent today": "$0.00",
        "spent in all": "$0.00",
        "open alerts": "0",
    }
    assert json.loads(call("ls", "--totals", "--json", "--name", "nothing").out)["runs"] == 0
    assert call("ls", "--totals", "--group-by", "tag").code == 2


def test_groups_of_runs(call: Call, run: Any) -> None:
    result = call("ls", "--group-by", "state", "--owner", "owner")
    assert result.code == 0, result.err
    head, group, total = result.out.splitlines()
    assert head.split()[:4] == ["STATE", "RUNS", "ACTIVE", "FAILED"]
    assert group.split()[:4] == ["running", "1", "1", "0"]
    assert total.split()[:2] == ["All", "1"]
    assert json.loads(call("ls", "--group-by", "tag", "--json").out)["by"] == "tag"
    wrong = call("ls", "--group-by", "tag", "-q", "stat:running")
    assert "Did you mean state:running?" in wrong.err
