"""Archives of user code: checked when they are uploaded, kept once by what they hold."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import PurePosixPath

from django.utils import timezone

from runs.exceptions import InvalidRun
from runs.models import Archive

ARCHIVE_BYTES = 20_000_000


def store_archive(data: bytes) -> Archive | None:
    """None for no archive. Raises :class:`InvalidRun`."""
    if not data:
        return None
    check_archive(data)
    archive, _ = Archive.objects.get_or_create(
        sha256=hashlib.sha256(data).hexdigest(),
        defaults={"data": data, "created_at": timezone.now()},
    )
    return archive


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
    except zipfile.BadZipFile as error:
        raise InvalidRun("archive", f"expected a zip of Python files: {error}") from error
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise InvalidRun("archive", f"expected paths inside the archive, found {name!r}")
    if not any(name.endswith(".py") for name in names):
        raise InvalidRun("archive", f"expected Python files, found none among {len(names)} entries")
