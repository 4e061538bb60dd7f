"""Names the first parameter in which two models differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

from diloco.protocol.records import FrozenEntry

SHOWN = 400
"""Characters of the description of a parameter in an error."""


class Described(Protocol):
    """Name, shape and dtype of a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> str: ...


def described(tensors: Iterable[Described], frozen: Iterable[FrozenEntry] = ()) -> list[str]:
    """Return one text for each tensor: name, shape and dtype; for a frozen one also the digest of
    its values, if there is one."""
    trained = [f"{tensor.name} {list(tensor.shape)} {tensor.dtype}" for tensor in tensors]
    return trained + [
        f"{entry.name} {list(entry.shape)} {entry.dtype}, frozen"
        + (f", digest {entry.digest[:16]}" if entry.digest else "")
        for entry in frozen
    ]


def first_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    """Describe the first difference of two lists of :func:`described`; '' if they are equal."""
    pairs = list(zip_longest(expected, found))
    different = [index for index, (one, other) in enumerate(pairs) if one != other]
    if not different:
        return ""
    one, other = pairs[different[0]]
    more = f", and {len(different) - 1} more differ" if len(different) > 1 else ""
    return (
        f"parameter {different[0]}: expected {_shown(one)} (of {len(expected)} parameters), "
        f"found {_shown(other)} (of {len(found)}){more}"
    )


def _shown(text: str | None) -> str:
    """The text of a parameter for an error. Its name can come from another machine."""
    shown = "".join(c if c.isprintable() else "\ufffd" for c in (text or "none")[:SHOWN])
    return shown if text is None or len(text) <= SHOWN else f"{shown}…"
