"""Archives of user code: checked when they are uploaded, kept once by what they hold, and for a day
if no run comes of them."""

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
"""A module that is longer is not parsed."""
KEPT = timedelta(days=1)
"""How long an upload waits for a run of it."""


def store_archive(data: bytes) -> Archive | None:
    """None for no archive. Raises :class:`InvalidRun`."""
    if not data:
        return None
    check_archive(data)
    now = timezone.now()
    archive, _ = Archive.objects.update_or_create(
        sha256=hashlib.sha256(data).hexdigest(),
        # Sent again it waits again, so that whoever sweeps does not take it from under a run.
        defaults={"created_at": now},
        create_defaults={"data": data, "created_at": now},
    )
    return archive


def kept_archive(sha256: str) -> Archive | None:
    """One that was uploaded before, by its digest; it waits another day. None if it is gone."""
    Archive.objects.filter(pk=sha256).update(created_at=timezone.now())
    return Archive.objects.filter(pk=sha256).first()


def sweep_archives(*, now: datetime) -> int:
    """Forget what was uploaded a day ago and no run needs; how many."""
    unused = Archive.objects.filter(created_at__lt=now - KEPT, run=None)
    return unused.delete()[0]


def check_function(data: bytes, function: str, *, elsewhere: bool = False) -> None:
    """Raises :class:`InvalidRun` where a zip cannot have the function that a workload names, as far
    as its source shows: nothing is imported or run. A module that fills its names in another way
    (star imports, ``__getattr__``, ``globals()``) is not judged, and neither is one that can come
    from ``elsewhere``: from the workload's requirements."""
    module, _, name = function.partition(":")
    path = module.replace(".", "/")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        found = next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in names), None)
        if found is None:
            top = module.partition(".")[0]
            is_own = any(entry.startswith((f"{top}/", f"{top}.")) for entry in names)
            if is_own or not (elsewhere or "." in module):
                modules = sorted(entry for entry in names if entry.endswith(".py"))
                raise InvalidRun(
                    "workload.function",
                    f"expected a module {module} in the archive, found {', '.join(modules[:5])}",
                )
            return
        if archive.getinfo(found).file_size > SOURCE_BYTES:
            return
        source = archive.read(found)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRun(
            "workload.function", f"expected Python in {found}, found {error}"
        ) from None
    defined = defined_names(tree)
    if defined is not None and name not in defined:
        known = ", ".join(sorted(defined)[:10]) or "none"
        raise InvalidRun(
            "workload.function", f"expected a function {name} in {found}, found {known}"
        )


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found, which does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return module in sys.modules


def defined_names(tree: ast.Module) -> set[str] | None:
    """The names that a module's source binds, in any block; None where it can bind others too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    return None
                found.add((alias.asname or alias.name).partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("globals", "vars", "exec", "setattr"):
            return None
    return None if "__getattr__" in found else found


def check_archive(data: bytes) -> None:
    """Raises :class:`InvalidRun` for what is no zip of Python files, or leaves its folder."""
    if len(data) > ARCHIVE_BYTES:
        raise InvalidRun(
            "archive",
            f"expected at most {ARCHIVE_BYTES / 1e6:g} MB, found {len(data) / 1e6:.1f} MB",
        )
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    # A zip of a later version, or one whose names are no text, is no BadZipFile to zipfile.
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
