"""The code bundle: the replica library as one zip, from which replicas run.

The bytes are deterministic: names are sorted, dates and modes fixed. The SHA-256 therefore
identifies the code, the same code is stored once, and ``group.json`` pins the code of every
replica.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import diloco

LIBRARY = Path(diloco.__file__).parent

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip can contain."""


@dataclass(frozen=True, kw_only=True)
class CodeBundle:
    data: bytes
    sha256: str


def make_bundle(library: Path = LIBRARY) -> CodeBundle:
    """Zip every Python file of a package, below the name of the package."""
    files = sorted(library.rglob("*.py"))
    names = [path.relative_to(library.parent).as_posix() for path in files]
    return _zipped(tuple(zip(names, map(Path.read_bytes, files), strict=True)))


@lru_cache(maxsize=1)
def _zipped(files: tuple[tuple[str, bytes], ...]) -> CodeBundle:
    """Zip these names and contents. Compression takes most of the time: a worker does it once."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files:
            info = zipfile.ZipInfo(name, date_time=_EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, data, compresslevel=6)
    zipped = buffer.getvalue()
    return CodeBundle(data=zipped, sha256=hashlib.sha256(zipped).hexdigest())
