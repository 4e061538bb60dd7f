"""Which prefix a run may have: no alias, not inside another, below an allowed folder."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.db import connection, connections

from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.store.location import canonical
from diloco.store.open import open_store
from runs.exceptions import CannotDo, InvalidRun
from runs.models import Run
from runs.restore.import_run import import_run
from runs.submit import create, prefixes
from runs.submit.create import check_draft, create_run, rendezvous_uri
from tests.runs import world as w

pytestmark = pytest.mark.django_db


@pytest.fixture
def olga(settings: Any, tmp_path: Path, outbox: list[Any]) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    return w.person("olga", "operator")


def made(olga: Any, rendezvous: str, name: str = "First here") -> Run:
    key = uuid.uuid4().hex
    return create_run(w.draft(rendezvous=rendezvous, name=name), owner=olga, submit_key=key)


def refusal(olga: Any, rendezvous: str) -> str:
    with pytest.raises(InvalidRun) as caught:
        made(olga, rendezvous, name="Second")
    assert caught.value.field == "rendezvous"
    assert not Run.objects.filter(name="Second").exists()
    return caught.value.message


@pytest.mark.parametrize(
    ("first", "second", "found"),
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
def test_no_prefix_is_another_run_s_or_overlaps_it(
    olga: Any, tmp_path: Path, first: str, second: str, found: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    made(olga, first.format(tmp_path))
    message = refusal(olga, second.format(tmp_path))
    assert f"expected a prefix no run has used, found one that {found}" in message or (
        f"found one {found}" in message
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
def test_prefixes_that_only_look_alike_are_apart(
    olga: Any, tmp_path: Path, first: str, second: str
) -> None:
    made(olga, first.format(tmp_path))
    made(olga, second.format(tmp_path))
    assert Run.objects.count() == 2


def test_the_canonical_form_is_stored(olga: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert made(olga, f"{tmp_path}/link//run/").rendezvous == (tmp_path / "real/run").as_uri()
    assert made(olga, "S3A://b/run/").rendezvous == "s3://b/run"


def test_a_run_that_the_viewer_may_not_see_is_not_named(
    olga: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(olga, "s3://b/run")
    draft = w.draft(rendezvous="s3://b/run/inner")
    for viewer in (None, AnonymousUser()):
        with pytest.raises(InvalidRun) as caught:
            check_draft(draft, uuid.uuid4(), viewer=viewer)  # type: ignore[arg-type]
        assert "First here" not in caught.value.message
        assert "of another run" in caught.value.message


@pytest.mark.parametrize(
    "way",
    [
        "{0}/outside", "file://{0}/outside/x", "/etc", "/", "{0}/roots", "{0}/roots/../outside",
        "{0}/roots/link/run", "file:///dev/null",
    ],
)  # fmt: skip
def test_a_folder_lies_below_an_allowed_one(
    olga: Any, settings: Any, tmp_path: Path, way: str
) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "roots")]
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "link").symlink_to(tmp_path / "outside")
    message = refusal(olga, way.format(tmp_path))
    assert f"expected a folder below {tmp_path}/roots or {tmp_path}/rendezvous" in message
    assert "ARCHIPELAGO_RENDEZVOUS_ROOTS" in message
    assert not (tmp_path / "outside").exists()


def test_where_a_link_leads_is_not_revealed(olga: Any, tmp_path: Path, settings: Any) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "roots")]
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "link").symlink_to(tmp_path / "hidden")
    for wanted in (tmp_path / "roots" / "link" / "run", Path("/proc/self/cwd")):
        message = refusal(olga, str(wanted))
        assert "hidden" not in message
        assert str(Path.cwd()) not in message


def test_a_folder_below_an_allowed_one_or_the_default_is_taken(
    olga: Any, settings: Any, tmp_path: Path
) -> None:
    settings.RENDEZVOUS_ROOTS = [str(tmp_path / "roots")]
    made(olga, f"{tmp_path}/roots/a")
    made(olga, f"{tmp_path}/rendezvous/a")
    made(olga, "")
    made(olga, "s3://b/run")
    assert Run.objects.count() == 4


def test_by_default_folders_lie_in_the_state_folder() -> None:
    from dashboard import settings as module

    assert module.RENDEZVOUS_ROOTS[0] == str(module.VAR_DIR / "rendezvous")


def test_two_that_looked_at_once_do_not_both_get_it(
    olga: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looked before the first was stored."""
    made(olga, "s3://b/run")
    with monkeypatch.context() as patch:
        patch.setattr(create, "check_draft", lambda *a, **k: "s3://b/run/inner")
        with pytest.raises(InvalidRun, match="inside the prefix of 'First here'"):
            made(olga, "s3://b/run/inner", name="Second")
    assert Run.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_of_many_overlapping_submissions_at_once_one_is_stored(olga: Any) -> None:
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
            outcomes.append(made(olga, rendezvous))
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


def test_rows_of_earlier_versions_are_brought_into_canonical_form(
    olga: Any, tmp_path: Path
) -> None:
    import importlib

    from django.apps import apps

    spellings = {
        f"FILE://{tmp_path}/x/../a": (tmp_path / "a").as_uri(), "s3a://b/run": "s3://b/run",
        "s3://B//odd": "s3://B//odd", "memory://run": "memory://run",
    }  # fmt: skip
    for spelling in spellings:
        run = made(olga, f"s3://{uuid.uuid4()}")
        Run.objects.filter(pk=run.pk).update(rendezvous=spelling, name=spelling)
    importlib.import_module("runs.migrations.0021_canonical_rendezvous").rewrite(apps, None)
    assert dict(Run.objects.values_list("name", "rendezvous")) == spellings
    assert prefixes.overlapping(canonical("s3://b/run/x")) is not None


def test_a_rendezvous_is_not_repeated_with_its_password(olga: Any) -> None:
    with pytest.raises(InvalidRun) as caught:
        rendezvous_uri("s3://key:hunter2@bucket/run", uuid.uuid4())
    assert "hunter2" not in str(caught.value)


def test_an_import_from_inside_another_run_s_prefix_is_refused(make_world: Any) -> None:
    world = make_world(replicas=1)
    run, owner = world.run, world.run.owner
    inner = f"{run.rendezvous}/inner"
    found = GroupDocument.from_bytes(open_store(run.rendezvous).get(keys.GROUP))
    copy = GroupDocument(**{**vars(found), "run_id": str(uuid.uuid4())})
    open_store(inner).put(keys.GROUP, copy.to_bytes())
    with pytest.raises((CannotDo, InvalidRun), match="inside the prefix of 'Test run'"):
        import_run(inner, owner=owner)
    assert [*Run.objects.all()] == [run]
