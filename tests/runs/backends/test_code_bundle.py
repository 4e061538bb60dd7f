"""The code bundle is deterministic, complete and importable."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

from runs.backends.code_bundle import LIBRARY, make_bundle


def test_same_code_gives_same_bytes(tmp_path: Path) -> None:
    first = make_bundle()
    assert first.sha256 == hashlib.sha256(first.data).hexdigest()
    copy = tmp_path / "diloco"
    for path in sorted(LIBRARY.rglob("*.py"), reverse=True):
        target = copy / path.relative_to(LIBRARY)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        target.chmod(0o600)
        os.utime(target, (1e9, 1e9))
    assert make_bundle(copy).data == first.data


def test_bundle_has_exactly_the_python_files() -> None:
    result = zipfile.ZipFile(BytesIO(make_bundle().data)).namelist()
    expected = sorted(f"diloco/{p.relative_to(LIBRARY).as_posix()}" for p in LIBRARY.rglob("*.py"))
    assert result == expected
    assert "diloco/replica.py" in result


def test_changed_code_changes_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "diloco").mkdir()
    code = tmp_path / "diloco" / "a.py"
    code.write_text("a = 1\n")
    before = make_bundle(tmp_path / "diloco").sha256
    code.write_text("a = 2\n")
    assert make_bundle(tmp_path / "diloco").sha256 != before


def test_bundle_can_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "code.zip"
    path.write_bytes(make_bundle().data)
    program = (
        "import diloco.protocol.records, diloco.store.base as s; "
        "assert s.__file__.startswith(__import__('sys').argv[1]), s.__file__"
    )
    subprocess.run(
        [sys.executable, "-S", "-c", program, str(path)],
        env={"PYTHONPATH": str(path), "PYTHONSAFEPATH": "1"},
        check=True,
        timeout=600,
        cwd=tmp_path,
    )
