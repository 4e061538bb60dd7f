"""``run.toml``: a run as a person writes it down."""

from __future__ import annotations

import io
import json
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from archipelago.client import Client
from archipelago.errors import Invalid

EXAMPLE = """\
# A run. What is left out has its default: `archipelago settings` lists all group settings,
# `archipelago backends` the hardware and its prices.
name = "First run"
time_limit_s = 1800          # 0: none
budget_usd = 0.0             # 0: none
# rendezvous = "s3://bucket/runs/first"     # left out, the server chooses
# store_credential = "bucket"               # the name of a credential of kind store

[settings]
sync_every = 90              # inner steps between two exchanges
total_rounds = 16
warmup_steps = 144
inner_lr = 3e-3
batch_size = 4
min_quorum = 1

[workload]
kind = "byte_gpt"
size = "demo"
data = "stdlib"
eval_bytes = 32768

[[pools]]
backend = "local"
hardware = "cpu"
count = 4

# [[pools]]
# backend = "modal"
# hardware = "H100"
# count = 8
# region = "us-east"
# spot = true
# timeout_s = 43200
# credential = "modal-team"  # left out, the server's own environment
"""


def read_document(name: str) -> dict[str, Any]:
    """TOML, or JSON by the file's name or its first character; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        raise Invalid(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Invalid(f"{name}: expected text in UTF-8") from None
    try:
        if name.endswith(".json") or text.lstrip().startswith("{"):
            found = json.loads(text)
        else:
            found = tomllib.loads(text)
    except ValueError as error:
        raise Invalid(f"{name}: {error}") from None
    if not isinstance(found, dict):
        raise Invalid(f"{name}: expected an object, found {type(found).__name__}")
    try:
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Invalid(f"{name}: expected text, numbers, lists and tables: {error}") from None
    return found


def with_code(client: Client, document: dict[str, Any], beside: str) -> dict[str, Any]:
    """A workload's ``archive`` that is a folder or a zip is uploaded, and named by what it holds.
    Paths are those of the file ``beside``."""
    workload = document.get("workload")
    if not isinstance(workload, dict):
        return document
    named = workload.get("archive")
    if not isinstance(named, str) or not named or re.fullmatch(r"[0-9a-f]{64}", named):
        return document
    path = (Path() if beside == "-" else Path(beside).parent) / named
    try:
        data = _zipped(path) if path.is_dir() else path.read_bytes()
    except OSError as error:
        raise Invalid(f"workload.archive: {path}: {error.strerror}") from None
    return {**document, "workload": {**workload, "archive": client.upload(data)}}


def _zipped(folder: Path) -> bytes:
    """The same bytes of the same files, so that they are stored once."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            if path.is_file() and not hidden:
                archive.writestr(zipfile.ZipInfo(name.as_posix()), path.read_bytes())
    return packed.getvalue()
