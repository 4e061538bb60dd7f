"""Valid prefixes: no alias, no overlap with another run, below an allowed folder."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.db import connection, connections

from runs.exceptions import InvalidRun
from runs.models import Run
from runs.submit import create
from runs.submit.create import check_draft, create_run
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator_user(settings: Any, tmp_path: Path, outbox: list[Any]) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    return w.person("olga", "operator")


def made(operator_user: Any, rendezvous: str, name: str = "First here") -> Run:
    key = uuid.uuid4().hex
    return create_run(
        w.draft(rendezvous=rendezvous, name=name), owner=operator_user, submit_key=key
    )


def refusal(operator_user: Any, rendezvous: str) -> str:
    with pytest.raises(InvalidRun) as caught:
        made(operator_user, rendezvous, name="Second")
    assert caught.value.field == "rendezvous"
    assert not Run.objects.filter(name="Second").exists()
    return caught.value.message


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        ("s3://b/runs", "s3://b/runs", "is the prefix"),
        ("s3://b/runs", "S3A://b/runs/", "is the prefix"),
        ("s3://b/runs", "s3://b/runs/1", "inside the prefix"),
        ("s3://b/runs/1/2", "s3://b/runs", "contains the prefix"),
        ("s3://b/runs", "s3://b", "contains the prefix"),
        ("s3://b", "s3://b/runs", "inside the prefix"),
        ("az://box/runs", "abfss://box/runs/1", "inside the prefix"),
        ("hf://datasets/Ada/set/run", "hf://datasets/ada/SET/run/1", "inside the prefix"),
        ("{0}/a", "{0}/a/rounds", "inside the prefix"),
        ("{0}/a/b", "{0}/a", "contains the prefix"),
        ("{0}/a", "{0}/x/../a", "is the prefix"),
        ("{0}/a", "FILE://{0}//a/.", "is the prefix"),
        ("{0}/a", "file://{0}/%61", "is the prefix"),
        ("{0}/a", "{0}/link/b", "inside the prefix"),
    ],
)
def test_a_prefix_overlaps_no_other_run(
    operator_user: Any, tmp_path: Path, first: str, second: str, result: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    made(operator_user, first.format(tmp_path))
    message = refusal(operator_user, second.format(tmp_path))
    assert f"expected a prefix no run has used, found one that {result}" in message or (
        f"found one {result}" in message
    )
    assert "'First here'" in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://b/runs", "s3://b/runs-other"),
        ("s3://b/runs", "s3://b/Runs"),
        ("s3://b/run_s", "s3://b/runxs"),
        ("s3://b/a", "gs://b/a"),
        ("{0}/a", "{0}/ab"),
        ("{0}/a%25", "{0}/a"),
    ],
)
def test_similar_prefixes_do_not_overlap(
    operator_user: Any, tmp_path: Path, first: str, second: str
) -> None:
    made(operator_user, first.format(tmp_path))
    made(operator_user, second.format(tmp_path))
    assert Run.objects.count() == 2


def test_the_canonical_form_is_stored(operator_user: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert (
        made(operator_user, f"{tmp_path}/link//run/").rendezvous == (tmp_path / "real/run").as_uri()
    )
    assert made(operator_user, "S3A://b/run/").rendezvous == "s3://b/run"


def test_a_run_hidden_from_the_viewer_is_not_named(
    operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(operator_user, "s3://b/run")
    draft = w.draft(rendezvous="s3://b/run/inner")
    for viewer in (None, AnonymousUser()):
        with pytest.raises(InvalidRun) as caught:
            check_draft(draft, uuid.uuid4(), viewer=viewer)  # type: ignore[arg-type]
        assert "First here" not in caught.value.message
        assert "of another run" in caught.value.message


@pytest.mark.parametrize(
    "way",
    [
        "{0}/outside",
        "file://{0}/outside/x",
        "/etc",
        "/",
        "{0}/roots",
        "{0}/roots/../outside",
        "{0}/roots/link/run",
        "file:///dev/null",
    ],
)
def test_a_folder_must_be_below_an_allowed_one(
    operator_user: Any, settings: Any, tmp_path: Path, way: str
) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "roots")]
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "link").symlink_to(tmp_path / "outside")
    message = refusal(operator_user, way.format(tmp_path))
    assert f"expected a folder below {tmp_path}/roots or {tmp_path}/rendezvous" in message
    assert "ARCHIPELAGO_RENDEZVOUS_ROOTS" in message
    assert not (tmp_path / "outside").exists()


def test_the_target_of_a_link_is_not_revealed(
    operator_user: Any, tmp_path: Path, settings: Any
) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "roots")]
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "link").symlink_to(tmp_path / "hidden")
    for wanted in (tmp_path / "roots" / "link" / "run", Path("/proc/self/cwd")):
        message = refusal(operator_user, str(wanted))
        assert "hidden" not in message
        assert str(Path.cwd()) not in message


def test_a_folder_below_an_allowed_one_or_the_default_is_accepted(
    operator_user: Any, settings: Any, tmp_path: Path
) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "roots")]
    made(operator_user, f"{tmp_path}/roots/a")
    made(operator_user, f"{tmp_path}/rendezvous/a")
    made(operator_user, "")
    made(operator_user, "s3://b/run")
    assert Run.objects.count() == 4


def test_the_default_folders_are_in_the_state_folder() -> None:
    from dashboard import settings as module

    assert module.RENDEZVOUS_ROOTS[0] == str(module.VAR_DIR / "rendezvous")


def test_two_concurrent_submissions_do_not_get_the_same_prefix(
    operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checks before the first is stored."""
    made(operator_user, "s3://b/run")
    with monkeypatch.context() as patch:
        patch.setattr(create, "check_draft", lambda *a, **k: "s3://b/run/inner")
        with pytest.raises(InvalidRun, match="inside the prefix of 'First here'"):
            made(operator_user, "s3://b/run/inner", name="Second")
    assert Run.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_many_overlapping_submissions_at_once_one_is_stored(operator_user: Any) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("threads do not share SQLite's database in memory")
    wanted = [
        "s3://b/run",
        "s3://b/run/1",
        "s3://b",
        "s3a://b/run/1/2",
        "s3://b/run",
        "s3://b/run/1",
    ]
    barrier = threading.Barrier(len(wanted))
    outcomes: list[object] = []

    def submit(rendezvous: str) -> None:
        try:
            barrier.wait()
            outcomes.append(made(operator_user, rendezvous))
        except InvalidRun as error:
            outcomes.append(error.field)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=submit, args=(uri,)) for uri in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("rendezvous") == len(wanted) - 1
    assert Run.objects.count() == 1
