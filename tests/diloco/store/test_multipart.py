"""Uploads behind their producer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from diloco.store.multipart import Data, upload_behind


def test_the_upload_has_ended_when_its_producer_fails() -> None:
    received: list[bytes] = []
    ended = threading.Event()

    def upload(parts: Iterator[Data]) -> None:
        try:
            received.extend(bytes(part) for part in parts)
        finally:
            ended.set()

    def parts() -> Iterator[Data]:
        yield b"1"
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        upload_behind(parts(), upload)
    assert ended.is_set() and received == [b"1"]


HANGING_UPLOAD = """
import threading
from diloco.store.multipart import upload_behind

asked = threading.Event()

def upload(parts):
    asked.set()
    threading.Event().wait()

threading.Thread(target=upload_behind, args=([b"1"], upload), daemon=True).start()
asked.wait()
"""


def test_a_process_exits_while_an_upload_hangs() -> None:
    subprocess.run([sys.executable, "-c", HANGING_UPLOAD], check=True, timeout=120)
