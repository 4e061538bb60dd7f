"""The one command that makes a replica of a bare image.

Without code the image has the module, and the command is ``python -m ENTRYPOINT ARGS``.
"""

from __future__ import annotations

from collections.abc import Sequence

from executors.base import CodeRef


def command(
    entrypoint: str,
    args: Sequence[str] = (),
    *,
    python: str = "python",
    code: CodeRef | None = None,
) -> list[str]:
    """The command line of a job."""
    if code is None:
        return [python, "-m", entrypoint, *args]
    raise NotImplementedError("code")


def packed_command(
    entrypoint: str,
    args: Sequence[str] = (),
    *,
    python: str = "python",
    code: CodeRef | None = None,
    max_chars: int = 256,
) -> list[str]:
    """The same in arguments of at most ``max_chars`` characters each, for backends with such a
    limit."""
    made = command(entrypoint, args, python=python, code=code)
    if all(len(part) <= max_chars for part in made):
        return made
    raise NotImplementedError("long arguments")
