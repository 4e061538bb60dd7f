"""The one command that makes a replica of a bare image.

Without code the image has the module, and the command is ``python -m ENTRYPOINT ARGS``. With a
:class:`~executors.base.CodeRef` it is ``python -c LOADER`` with :mod:`executors.bootstrap.script`
packed into the arguments, which on the machine of the job

1. installs, by pip, the requirements that the image lacks or has in another version; an importable
   torch is kept whatever its version, and everything pip brings along is held to the pins;
2. fetches ``code/<sha256>.zip`` and the archives of user code from the rendezvous, with the
   credentials of the job's environment, and refuses what has another digest;
3. becomes ``python -m ENTRYPOINT ARGS`` with the code on ``PYTHONPATH`` (user code first),
   ``PYTHONSAFEPATH`` set, and what both took in ``DILOCO_BOOTSTRAP``: ``{"install_s": 12.3,
   "fetch_s": 0.4}``.

It ends with 75 where another try may help (no network), with 78 where none will: a wrong digest, no
code, a requirement nobody has, a Python that is too old. Its last line says which.

The requirements are the caller's to pin: what the entrypoint imports and the image may lack, and
the client of the rendezvous' kind of bucket (``obstore`` or ``s3fs`` for ``s3://``, ``gcsfs``,
``adlfs``, ``huggingface_hub``), which the fetch uses too. A folder needs none.
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

# What the chunks hold is run, and what follows them are its arguments. An older Python could not
# even read the script; this it can.
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

    With ``layer`` missing requirements go into a folder of their own beside the fetched code, and
    the Python that runs this, which others use too, is left as it is.
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
    """The same in arguments of at most ``max_chars`` characters each, for backends with such a
    limit; they then show less of what is run. More than ``max_parts`` arguments, and such with line
    breaks, are packed too."""
    plain = command(entrypoint, args, python=python)
    if code is None:
        if len(plain) <= max_parts and all(
            len(part) <= max_chars and "\n" not in part for part in plain
        ):
            return plain
        source = "import runpy\nrunpy.run_module(sys.argv[0],run_name='__main__',alter_sys=True)\n"
        given = [entrypoint, *args]
    else:
        source, given = _source(), ["bootstrap", _document(code), entrypoint, *args]
    text = _packed(f"import sys\nsys.argv[:]={given!r}\n{source}")
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
