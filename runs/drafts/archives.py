"""Archives of user code: checked when they are uploaded, kept once by what they hold, and for a day
if no run comes of them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from datetime import datetime, timedelta
from pathlib import PurePosixPath

from django.utils import timezone

from runs.exceptions import InvalidRun
from runs.models import Archive

ARCHIVE_BYTES = 20_000_000
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
