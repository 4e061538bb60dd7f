"""Write the body of an answer to a file, or to standard output."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from archipelago import terminal

FORMATS = ("csv", "jsonl", "parquet")
"""Formats of exported tables."""


def write(chunks: Iterable[bytes], to: Path) -> int:
    """Write to a file of another name first, so that ``to`` is complete or unchanged. Returns the
    size in bytes."""
    part = to.with_name(f".{to.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as file:
            size = sum(file.write(chunk) for chunk in chunks)
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
    return size


def save(chunks: Iterable[bytes], name: str) -> int:
    """Write to the file ``name`` and print its size; ``-`` is standard output. Returns the exit
    status 0."""
    if name == "-":
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    else:
        print(f"{name}: {terminal.size(write(chunks, Path(name)))}", file=sys.stderr)
    return 0
