"""Build the command line that starts a replica in a bare image.

Without code the image contains the module, and the command is ``python -m ENTRYPOINT ARGS``. With a
:class:`~executors.base.CodeRef` it is ``python -c LOADER`` with :mod:`executors.bootstrap.script`
packed into the arguments. On the job's machine the script

1. installs, by pip, the requirements that the image lacks or has in another version; an importable
   torch of any version is kept, and dependencies are constrained to the pins;
2. fetches ``code/<sha256>.zip`` and the archives of user code from the rendezvous, with the
   credentials of the job's environment, and verifies their digests;
3. executes ``python -m ENTRYPOINT ARGS`` with the code on ``PYTHONPATH`` (user code first),
   ``PYTHONSAFEPATH`` set, and the durations in ``DILOCO_BOOTSTRAP``: ``{"install_s": 12.3,
   "fetch_s": 0.4}``.

It exits with 75 for a temporary failure (no network) and with 78 for a permanent one: a wrong
digest, missing code, an unknown requirement, an unsupported Python. The last line gives the reason.

The caller pins the requirements: the imports of the entrypoint that the image can lack, and the
client for the rendezvous' kind of bucket (``obstore`` or ``s3fs`` for ``s3://``, ``gcsfs``,
``adlfs``, ``huggingface_hub``), which the fetch uses too. A folder needs no client.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from executors.base import CodeRef

_SCRIPT = Path(__file__).with_name("script.py")

# Runs the script in the chunks; the remaining arguments are the script's. Old versions of Python
# can parse this loader, but not the script.
_LOADER = (
    "import sys,zlib,base64 as b;"
    "sys.version_info<(3,11)and(print('error: bootstrap: expected Python 3.11 or newer, found '"
    "+sys.version),sys.exit(78));"
    "n=int(sys.argv[1])+2;s=zlib.decompress(b.b64decode(''.join(sys.argv[2:n])));"
    "del sys.argv[1:n];exec(s)"
)


def command(
    entrypoint: str,
    args: Sequence[str] = (),
    *,
    python: str = "python",
    code: CodeRef | None = None,
    layer: bool = False,
) -> list[str]:
    """The command line of a job.

    Args:
        layer: install missing requirements into a separate folder beside the fetched code, and
            leave the shared Python installation unchanged.
    """
    if code is None:
        return [python, "-m", entrypoint, *args]
    chunk = _packed(_source())
    return [python, "-c", _LOADER, "1", chunk, _document(code, layer=layer), entrypoint, *args]


def packed_command(
    entrypoint: str,
    args: Sequence[str] = (),
    *,
    python: str = "python",
    code: CodeRef | None = None,
    max_chars: int = 256,
    max_parts: int = 100,
) -> list[str]:
    """:func:`command` in arguments of at most ``max_chars`` characters, for backends with a limit.

    More than ``max_parts`` arguments, and arguments with line breaks, are packed too. The backend
    then shows less of the command.
    """
    plain = command(entrypoint, args, python=python)
    if code is None:
        if len(plain) <= max_parts and all(
            len(part) <= max_chars and "\n" not in part for part in plain
        ):
            return plain
        source = "import runpy\nrunpy.run_module(sys.argv[0],run_name='__main__',alter_sys=True)\n"
        argv = [entrypoint, *args]
    else:
        source, argv = _source(), ["bootstrap", _document(code), entrypoint, *args]
    text = _packed(f"import sys\nsys.argv[:]={argv!r}\n{source}")
    chunks = [text[n : n + max_chars] for n in range(0, len(text), max_chars)]
    return [python, "-c", _LOADER, str(len(chunks)), *chunks]


@lru_cache(maxsize=1)
def _source() -> str:
    return _SCRIPT.read_text()


@lru_cache(maxsize=16)
def _packed(source: str) -> str:
    return base64.b64encode(zlib.compress(source.encode(), 9)).decode()


def _document(code: CodeRef, *, layer: bool = False) -> str:
    return json.dumps(
        {
            "uri": code.uri,
            "sha256": code.sha256,
            "archives": list(code.archives),
            "requirements": list(code.requirements),
            "layer": layer,
        }
    )
