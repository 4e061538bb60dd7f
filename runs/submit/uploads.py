"""Uploaded archives of user code: checked on upload, stored once per digest, and deleted after a
day if no run uses them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import sys
import zipfile
from datetime import datetime, timedelta
from pathlib import PurePosixPath

from django.utils import timezone

from runs.exceptions import InvalidRun
from runs.models import Archive

ARCHIVE_BYTES = 20_000_000
SOURCE_BYTES = 1_000_000
"""Longer modules are not parsed."""
KEPT = timedelta(days=1)
"""How long an unused upload is kept."""


def store_archive(data: bytes) -> Archive | None:
    """Store an archive; None for no data. Raises :class:`InvalidRun`."""
    if not data:
        return None
    check_archive(data)
    now = timezone.now()
    archive, _ = Archive.objects.update_or_create(
        sha256=hashlib.sha256(data).hexdigest(),
        # An upload that is sent again is kept for another day, so the sweep does not delete it.
        defaults={"created_at": now},
        create_defaults={"data": data, "created_at": now},
    )
    return archive


def kept_archive(sha256: str) -> Archive | None:
    """An uploaded archive by its digest, kept for another day; None if it is gone."""
    Archive.objects.filter(pk=sha256).update(created_at=timezone.now())
    return Archive.objects.filter(pk=sha256).first()


def sweep_archives(*, now: datetime) -> int:
    """Delete uploads older than a day that no run uses; return their number."""
    unused = Archive.objects.filter(created_at__lt=now - KEPT, run=None)
    return unused.delete()[0]


def check_function(data: bytes, function: str, *, elsewhere: bool = False) -> None:
    """Raise :class:`InvalidRun` if a zip cannot contain the workload's function.

    Only the source is read; nothing is imported or run. A module that binds names in other ways
    (star imports, ``__getattr__``, ``globals()``) passes, and so does one that can come from
    ``elsewhere``: from the workload's requirements.
    """
    module, _, name = function.partition(":")
    path = module.replace(".", "/")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        source_path = next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in names), None)
        if source_path is None:
            top = module.partition(".")[0]
            is_own = any(entry.startswith((f"{top}/", f"{top}.")) for entry in names)
            if is_own or not (elsewhere or "." in module):
                modules = sorted(entry for entry in names if entry.endswith(".py"))
                raise InvalidRun(
                    "workload.function",
                    f"expected a module {module} in the archive, found {', '.join(modules[:5])}",
                )
            return
        if archive.getinfo(source_path).file_size > SOURCE_BYTES:
            return
        source = archive.read(source_path)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRun(
            "workload.function", f"expected Python in {source_path}, found {error}"
        ) from None
    defined = defined_names(tree)
    if defined is not None and name not in defined:
        known = ", ".join(sorted(defined)[:10]) or "none"
        raise InvalidRun(
            "workload.function", f"expected a function {name} in {source_path}, found {known}"
        )


def is_installed(module: str) -> bool:
    """Whether a top-level module can be located, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules


def defined_names(tree: ast.Module) -> set[str] | None:
    """The names that a module's source binds in any block; None if it can bind others, too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    return None
                names.add((alias.asname or alias.name).partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("globals", "vars", "exec", "setattr"):
            return None
    return None if "__getattr__" in names else names


def check_archive(data: bytes) -> None:
    """Raise :class:`InvalidRun` unless the data is a zip of Python files with safe paths."""
    if len(data) > ARCHIVE_BYTES:
        raise InvalidRun(
            "archive",
            f"expected at most {ARCHIVE_BYTES / 1e6:g} MB, found {len(data) / 1e6:.1f} MB",
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    # Depending on the zip's version and names, zipfile raises other exceptions than BadZipFile.
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise InvalidRun(
            "archive", f"expected a zip of Python files, found one that cannot be read: {error}"
        ) from error
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise InvalidRun("archive", f"expected paths inside the archive, found {name!r}")
    if not any(name.endswith(".py") for name in names):
        raise InvalidRun("archive", f"expected Python files, found none among {len(names)} entries")
