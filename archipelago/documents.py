"""Read run documents: ``run.toml`` or JSON, with the code folder they refer to."""

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
# A run. Omitted fields have their defaults: `archipelago settings` lists the group settings,
# `archipelago backends` the hardware and its prices.
name = "First run"
time_limit_s = 1800          # 0: no limit
budget_usd = 0.0             # 0: no limit
tags = []                    # e.g. ["paper"]: for filters, and for budgets of a tag
# rendezvous = "s3://bucket/runs/first"     # default: chosen by the server
# store_credential = "bucket"               # name of a credential of kind store

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
# credential = "modal-team"  # default: the environment of the server

# [[evaluations]]            # jobs that measure checkpoints; all fields: docs/evaluation.md
# name = "val"
# data = "s3://bucket/validation"   # token shards; default: held-out data of the run
# every = 2                  # checkpoints; 0: on request
"""


def read_run(client: Client, name: str) -> dict[str, Any] | str:
    """The document in a file, with its code uploaded; the text of a YAML file, which the server
    parses."""
    if name.endswith((".yaml", ".yml")):
        return _read(name)
    return with_code(client, read_document(name), name)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text()
    except OSError as error:
        raise Invalid(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Invalid(f"{name}: expected text in UTF-8") from None


def read_document(name: str) -> dict[str, Any]:
    """Parse a document. It is JSON if its name or first character indicates it, otherwise TOML;
    ``-`` is standard input."""
    text = _read(name)
    try:
        if name.endswith(".json") or text.lstrip().startswith("{"):
            document = json.loads(text)
        else:
            document = tomllib.loads(text)
    except ValueError as error:
        raise Invalid(f"{name}: {error}") from None
    if not isinstance(document, dict):
        raise Invalid(f"{name}: expected an object, found {type(document).__name__}")
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Invalid(f"{name}: expected text, numbers, lists and tables: {error}") from None
    return document


def with_code(client: Client, document: dict[str, Any], beside: str) -> dict[str, Any]:
    """The document with the workload's ``archive`` uploaded, if it names a folder or a zip, and
    replaced by its sha256. Paths are relative to the file ``beside``."""
    workload = document.get("workload")
    if not isinstance(workload, dict):
        return document
    name = workload.get("archive")
    if not isinstance(name, str) or not name or re.fullmatch(r"[0-9a-f]{64}", name):
        return document
    path = (Path() if beside == "-" else Path(beside).parent) / name
    try:
        data = _zipped(path) if path.is_dir() else path.read_bytes()
    except OSError as error:
        raise Invalid(f"workload.archive: {path}: {error.strerror}") from None
    return {**document, "workload": {**workload, "archive": client.upload(data)}}


def _zipped(folder: Path) -> bytes:
    """Pack a folder. Equal files give equal bytes, so that the server stores them once."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            if path.is_file() and not hidden:
                archive.writestr(zipfile.ZipInfo(name.as_posix()), path.read_bytes())
    return buffer.getvalue()
