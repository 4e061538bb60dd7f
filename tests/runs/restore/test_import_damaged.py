"""A bucket with lost or changed objects: the import reports it, or refuses it and leaves no rows.
Never an exception, and never an incomplete run that looks complete."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from diloco.protocol import keys
from diloco.protocol.ownership import PrefixOwner
from diloco.store.base import Store
from runs.models import Archive, MetricBlock, Round, Run
from runs.restore import import_run
from tests.module_rows import Unblock
from tests.runs.conftest import (
    create,
    launched,
    patched_clock,
    patched_executor,
    patched_outbox,
)
from tests.runs.restore.test_import import end, run_rounds_and_failures
from tests.runs.rows import rows
from tests.runs.run_harness import Bucket, Clock

pytestmark = [pytest.mark.django_db, pytest.mark.slow(minutes=1)]

MILLION = 10**6


@dataclass
class Outcome:
    """``refused`` is the error of the command, '' where the run was imported with ``remarks``."""

    run: Run | None
    refused: str
    remarks: str


def attempt_import(uri: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    try:
        call_command("import_run", uri, stdout=out, stderr=err)
    except CommandError as error:
        return Outcome(None, str(error), err.getvalue())
    return Outcome(Run.objects.get(rendezvous=uri), "", err.getvalue())


@dataclass
class Lost:
    """A run whose rows are deleted, so that it exists only in its bucket."""

    run: Run
    bucket: Bucket
    before: dict[str, Any]
    """The rows of the ended run."""
    live: dict[str, bytes]
    """The objects of the bucket before the run ended."""
    ended: dict[str, bytes]

    def fill(self, objects: dict[str, bytes]) -> None:
        """Let the bucket contain these objects and no other ones."""
        now = contents(self.bucket.store)
        self.bucket.store.delete([key for key in now if key not in objects])
        for key, data in objects.items():
            if now.get(key) != data:
                self.bucket.store.put(key, data)


def contents(store: Store) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list("")}


@pytest.fixture(scope="module")
def made(module_rows: Unblock, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    from django.conf import settings

    from runs.submit.run_draft import PoolDraft

    folder = tmp_path_factory.mktemp("rendezvous")
    with pytest.MonkeyPatch.context() as patch, module_rows():
        patch.setattr(settings, "DEFAULT_RENDEZVOUS", folder.as_uri())
        workers = patched_clock(patch), patched_executor(patch), patched_outbox(patch)
        pools = (PoolDraft(count=2, price_usd_h=36.0),)
        run = create(replicas=2, pools=pools, budget_usd=1e6)
        harness = launched(run, patch, *workers)
        run_rounds_and_failures(harness)
        store = harness.bucket.store
        live = contents(store)
        end(harness)
        result = Lost(run, harness.bucket, rows(run), live, contents(store))
        Run.objects.filter(pk=run.pk).delete()
        return result


@pytest.fixture
def lost(db: None, made: Lost, clock: Clock, executor: Any, outbox: Any) -> Lost:
    """The ended run, whose bucket a test can damage."""
    clock.pass_s(3600)
    made.fill(made.ended)
    return replace(made, run=copy.deepcopy(made.run))


def nothing_is_left() -> bool:
    return not (Run.objects.exists() or MetricBlock.objects.exists() or Archive.objects.exists())


def test_a_missing_commit_is_named(lost: Lost) -> None:
    lost.bucket.store.delete([keys.commit(2)])
    result = attempt_import(lost.run.rendezvous)
    assert f"expected {keys.commit(2)}, found none" in result.refused
    assert nothing_is_left()


def test_a_marker_of_another_run_is_refused(lost: Lost) -> None:
    other = str(uuid.uuid4())
    lost.bucket.store.put(keys.OWNER, PrefixOwner(run_id=other).to_bytes())
    result = attempt_import(lost.run.rendezvous)
    assert f"found run {other} in the first" in result.refused.replace("'", "")
    assert nothing_is_left()
    lost.bucket.store.put(keys.OWNER, b"no marker")
    assert "is not the marker of a run" in attempt_import(lost.run.rendezvous).refused
    assert nothing_is_left()
    lost.bucket.store.put(keys.OWNER, PrefixOwner(run_id=str(lost.run.pk)).to_bytes())
    assert attempt_import(lost.run.rendezvous).run is not None


def test_a_submission_between_check_and_import_is_excluded_by_the_lock(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    checked = import_run.check_free
    monkeypatch.setattr(import_run, "lock", lambda: seen.append("lock"))
    monkeypatch.setattr(
        import_run, "check_free", lambda *a, **k: (seen.append("check"), checked(*a, **k))
    )
    assert attempt_import(lost.run.rendezvous).run is not None
    assert seen == ["lock", "check"]


@pytest.mark.parametrize("n", [1, 3])
def test_a_missing_journal_object_of_a_finished_run_is_a_remark_and_an_event(
    lost: Lost, n: int
) -> None:
    lost.bucket.store.delete([keys.journal(n)])
    result = attempt_import(lost.run.rendezvous)
    assert result.run is not None
    assert result.run.state == "cancelled"
    assert f"remark: not read: {keys.journal(n)}: expected an object, found none" in result.remarks
    event = result.run.events.get(kind="import")
    assert keys.journal(n) in event.message
    assert event.level == "warning"


def test_a_missing_journal_object_of_a_live_run_is_refused(lost: Lost) -> None:
    lost.fill(lost.live)
    lost.bucket.store.delete([keys.journal(2)])
    result = attempt_import(lost.run.rendezvous)
    assert f"{keys.journal(2)}: expected an object, found none" in result.refused
    assert nothing_is_left()


def test_a_missing_segment_is_a_remark_and_the_later_ones_are_read(lost: Lost) -> None:
    from tests.runs.run_harness import incarnation

    key = keys.telemetry(0, incarnation(0), 2)
    lost.bucket.store.delete([key])
    result = attempt_import(lost.run.rendezvous)
    assert result.run is not None
    assert f"remark: {key}: expected an object, found none" in result.remarks
    assert result.run.replicas.get(number=0).step == 13  # of the last segment


def objects(store: Store) -> list[str]:
    return [info.key for info in store.list("") if info.key.endswith(".json")]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all leaves and containers of a JSON value, the first item of each list only."""
    yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, (*path, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**31,
    2**53 + 1,
    2**63,
    10**400,
    1e308,
    math.nan,
    math.inf,
    "",
    "x" * 70_000,
    "\x00",
    "\ud800",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-12:00",
    "2030-01-01",
    [],
    {},
    [[]],
    [1, "a"],
    {"a": {"\x00": math.nan}},
)


def damages(store: Store) -> Iterator[tuple[str, str, bytes | None]]:
    """(key, damage, new bytes or None for deletion), in a deterministic order."""
    turn = 0
    for key in objects(store):
        data = store.get(key)
        yield key, "deleted", None
        yield key, "empty", b""
        yield key, "truncated", data[: len(data) // 2]
        yield key, "nested", b'{"v":' + b"[" * 50_000
        try:
            body = json.loads(data)
        except ValueError:
            continue  # it was no record before
        for path in places(body):
            for _ in range(2):
                new = WRONG[turn % len(WRONG)]
                turn += 1
                text = json.dumps(changed(body, path, new)).encode()
                yield key, f"{path} = {str(new)[:30]!r}", text
            if path and isinstance(path[-1], str):
                twice = text.decode().replace(
                    f'"{path[-1]}":', f'"{path[-1]}": 1, "{path[-1]}":', 1
                )
                yield key, f"{path} twice", twice.encode()


DAMAGES = 63
"""Number of tested damages, of about 4000; ``ARCHIPELAGO_LONG=1`` tests all."""


def test_damage_is_refused_or_reported(lost: Lost) -> None:
    store, uri = lost.bucket.store, lost.run.rendezvous
    result = list(damages(store))
    step = 1 if os.environ.get("ARCHIPELAGO_LONG") else max(len(result) // DAMAGES, 1)
    tried = refused = 0
    for key, what, data in result[::step]:
        before = store.get(key)
        if data is None:
            store.delete([key])
        else:
            store.put(key, data)
        try:
            outcome = attempt_import(uri)
        finally:
            store.put(key, before)
        tried += 1
        why = f"{key}: {what}: {outcome}"
        if outcome.run is None:
            refused += 1
            assert outcome.refused, why
            assert len(outcome.refused) < 2_000, why
            assert nothing_is_left(), why
        else:
            assert outcome.run.state == "cancelled", why
            assert outcome.run.next_round == lost.run.next_round, why
            assert outcome.run.state_reason != "being imported", why
            silent = not outcome.remarks and not outcome.run.events.filter(kind="refused").exists()
            assert not silent or what != "deleted" or is_optional(key), why
            outcome.run.delete()
    assert tried >= 42
    assert 0 < refused < tried


def is_optional(key: str) -> bool:
    """Objects that no other object refers to, or whose content is not repeated elsewhere."""
    return not key.startswith((keys.JOURNAL, keys.GROUP)) and not key.endswith("commit.json")


def test_a_finished_run_is_imported_with_its_cosines(lost: Lost) -> None:
    assert attempt_import(lost.run.rendezvous).run is not None
    assert rows(Run.objects.get())["Round"] == lost.before["Round"]
    assert Round.objects.exists()
