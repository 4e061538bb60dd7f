"""Code in a rendezvous, and jobs that fetch it, for tests of the bootstrap."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from executors.base import CodeRef
from executors.bootstrap import command as bootstrap

PROGRAM = """
import json, os, sys
print("ran " + json.dumps([sys.argv[1:], os.environ.get("REPLICA_RANK")]))
print("path " + os.environ["PYTHONPATH"])
print("took " + os.environ["DILOCO_BOOTSTRAP"])
"""


def zipped(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def put(rendezvous: Path, files: Mapping[str, str]) -> str:
    """The digest of a zip of ``files`` in a rendezvous that is a folder."""
    data = zipped(files)
    digest = hashlib.sha256(data).hexdigest()
    (rendezvous / "code").mkdir(parents=True, exist_ok=True)
    (rendezvous / "code" / f"{digest}.zip").write_bytes(data)
    return digest


def code_in(rendezvous: Path, **more: tuple[str, ...]) -> CodeRef:
    """A bundle with the module ``bundled``."""
    digest = put(rendezvous, {"bundled.py": PROGRAM})
    return CodeRef(uri=rendezvous.as_uri(), sha256=digest, **more)


def bare_environment(kept: Path, **more: str) -> dict[str, str]:
    """The environment of a job in an image: only the PATH of this process."""
    return {"PATH": os.environ["PATH"], "HOME": str(kept), "DILOCO_CODE_DIR": str(kept), **more}


def run(
    code: CodeRef,
    env: Mapping[str, str],
    *args: str,
    python: Path | str,
    entrypoint: str = "bundled",
    layer: bool = False,
) -> subprocess.CompletedProcess[str]:
    command = bootstrap.command(entrypoint, args, python=str(python), code=code, layer=layer)
    return finish(command, env)


def finish(command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
