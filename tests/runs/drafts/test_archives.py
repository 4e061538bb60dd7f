"""A zip that somebody sends is read, or refused in words; it is never an error of ours."""

from __future__ import annotations

import io
import random
import zipfile

import pytest

from runs.drafts.archives import ARCHIVE_BYTES, check_archive
from runs.exceptions import InvalidRun


def zipped(*names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
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
def test_what_is_no_zip_of_python_files_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRun, match=r"expected .*, found ") as found:
        check_archive(data)
    assert found.value.field == "archive"


def test_a_spoilt_zip_is_never_more_than_refused() -> None:
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
