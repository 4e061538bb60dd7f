"""An uploaded zip is accepted or refused with a message; it never causes an exception."""

from __future__ import annotations

import io
import random
import zipfile
from typing import Any

import pytest

from diloco.protocol.workload import CustomWorkload
from runs.exceptions import InvalidRun
from runs.models import Archive, Run
from runs.submit.uploads import (
    ARCHIVE_BYTES,
    KEPT,
    check_archive,
    check_function,
    kept_archive,
    store_archive,
)
from runs.tasks import forget_uploads


def zipped(*names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, b"def build(): ...\n")
    return packed.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"no zip",
        zipped(),
        zipped("weights.bin"),
        zipped("../mine.py"),
        zipped("/mine.py"),
        # Of zip's version 25.5; its name as UTF-8, of which it has half a letter.
        zipped("mine.py").replace(b"PK\x01\x02\x14\x03\x14", b"PK\x01\x02\x14\x03\xff"),
        zipped("maß.py").replace("ß".encode(), b"\xc3\xc3"),
        zipped("mine.py") + bytes(ARCHIVE_BYTES),
    ],
)
def test_anything_but_a_zip_of_python_files_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRun, match=r"expected .*, found ") as result:
        check_archive(data)
    assert result.value.field == "archive"


def test_a_damaged_zip_is_refused_without_an_exception() -> None:
    whole, chance, refused = zipped("mine.py", "maß.txt"), random.Random(0), 0
    check_archive(whole)
    for _ in range(2000):
        spoilt = bytearray(whole)
        spoilt[chance.randrange(len(whole))] = chance.randrange(256)
        try:
            check_archive(
                bytes(spoilt[: chance.choice([len(whole), chance.randrange(len(whole))])])
            )
        except InvalidRun:
            refused += 1
    assert refused > 500


# Retention.


def stored(name: str = "mine.py") -> str:
    archive = store_archive(zipped(name))
    assert archive is not None
    return archive.pk


@pytest.mark.django_db
def test_an_unused_upload_is_deleted_after_a_day(clock: Any) -> None:
    old = stored("old.py")
    clock.pass_s(3600)
    new = stored("new.py")
    clock.pass_s(KEPT.total_seconds() - 3600)
    forget_uploads()
    assert set(Archive.objects.values_list("pk", flat=True)) == {old, new}
    clock.pass_s(1)
    forget_uploads()
    assert list(Archive.objects.values_list("pk", flat=True)) == [new]


@pytest.mark.django_db
def test_an_upload_that_is_used_again_is_kept_for_another_day(clock: Any) -> None:
    sent, previewed = stored("sent.py"), stored("previewed.py")
    clock.pass_s(KEPT.total_seconds())
    assert stored("sent.py") == sent
    assert kept_archive(previewed) is not None
    clock.pass_s(KEPT.total_seconds())
    forget_uploads()
    assert Archive.objects.count() == 2


def test_an_upload_is_kept_as_long_as_its_run(make_run: Any, clock: Any) -> None:
    digest = stored()
    run = make_run(workload=CustomWorkload(function="mine:build", archive=digest))
    assert run.archive.pk == digest  # found by its digest, without another upload
    clock.pass_s(10 * KEPT.total_seconds())
    forget_uploads()
    assert Archive.objects.count() == 1
    run.delete()
    forget_uploads()
    assert not Archive.objects.exists()


def test_a_missing_zip_prevents_the_run(make_run: Any) -> None:
    with pytest.raises(InvalidRun, match="found none") as refused:
        make_run(workload=CustomWorkload(function="mine:build", archive="0" * 64))
    assert refused.value.field == "archive"
    assert not Run.objects.exists()


def test_the_sweep_is_scheduled() -> None:
    from dashboard.celery import app

    [entry] = [e for e in app.conf.beat_schedule.values() if e["task"] == forget_uploads.name]
    assert entry["schedule"] <= KEPT.total_seconds() / 2


def zip_of(**modules: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, source in modules.items():
            archive.writestr(f"{name.replace('__in__', '/')}.py", source)
    return data.getvalue()


@pytest.mark.parametrize(
    ("modules", "function", "message"),
    [
        ({"spirals": "def build(): ..."}, "spirals:bild", "expected a function bild in spirals.py"),
        (
            {"spirals": "def build(): ..."},
            "spiral:build",
            "expected a module spiral in",
        ),
        ({"a__in__b": "x = 1"}, "a.b:build", "expected a function build in a/b.py, found x"),
        ({"a__in__b": "x = 1"}, "a.c:build", "expected a module a.c in the archive"),
        ({"spirals": "def build(:"}, "spirals:build", "expected Python in spirals.py"),
    ],
)
def test_a_function_that_cannot_be_in_the_archive_is_refused(
    modules: dict[str, str], function: str, message: str
) -> None:
    with pytest.raises(InvalidRun, match=message) as refused:
        check_function(zip_of(**modules), function)
    assert refused.value.field == "workload.function"


@pytest.mark.parametrize(
    "source",
    [
        "def build(): ...",
        "async def build(): ...",
        "class build: ...",
        "build = lambda: 0",
        "from elsewhere import other as build",
        "import build",
        "if True:\n    def build(): ...",
        "try:\n    from fast import build\nexcept ImportError:\n    build = None",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "globals()['build'] = 1",
        "raise RuntimeError('is never run')\ndef build(): ...",
    ],
)
def test_a_function_that_can_be_there_is_accepted(source: str) -> None:
    check_function(zip_of(spirals=source), "spirals:build")
    check_function(zip_of(spirals__in____init__=source), "spirals:build")
