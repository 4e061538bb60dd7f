"""Torch-free description of what is trained, shared by the form, the planner and the replica.

A workload document is the ``workload`` object of ``group.json``. The built-in one is the
byte-level GPT; its sizes and parameter counts are here so that a page can show them without torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.rendezvous.settings import SettingsError

VOCABULARY = 256
"""Byte-level: every byte is a token."""

STDLIB = "stdlib"
"""Data source: the Python standard library's own source text, which every machine has."""


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """Shape of a byte-level GPT: pre-norm blocks, rotary positions, tied embedding."""

    layers: int
    width: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        """Number of trained parameters; a test compares it with the model itself."""
        block = 12 * self.width * self.width + 2 * self.width
        return VOCABULARY * self.width + self.layers * block + self.width


GPT_SIZES: dict[str, GPTSize] = {
    "demo": GPTSize(layers=3, width=96, heads=3, context=128),
    "micro": GPTSize(layers=4, width=160, heads=5, context=256),
    "mini": GPTSize(layers=6, width=256, heads=8, context=256),
    "small": GPTSize(layers=8, width=512, heads=8, context=512),
    "base": GPTSize(layers=12, width=768, heads=12, context=1024),
    "large": GPTSize(layers=15, width=832, heads=13, context=1024),
}


@dataclass(frozen=True, kw_only=True)
class ByteGPTWorkload:
    """The built-in workload: a byte-level GPT on text.

    ``data`` is :data:`STDLIB` or an fsspec URI, which may be a folder or a glob. ``eval_bytes`` is
    how much of the held-out text one evaluation reads.
    """

    size: str = "demo"
    data: str = STDLIB
    eval_bytes: int = 65_536

    kind = "byte_gpt"

    def __post_init__(self) -> None:
        if self.size not in GPT_SIZES:
            raise SettingsError(
                "size", f"expected one of {', '.join(GPT_SIZES)}, found {self.size!r}"
            )
        if not isinstance(self.data, str) or not self.data.strip():
            raise SettingsError("data", f"expected {STDLIB!r} or a URI, found {self.data!r}")
        if not isinstance(self.eval_bytes, int) or self.eval_bytes < 1:
            raise SettingsError("eval_bytes", f"expected 1 or more, found {self.eval_bytes!r}")

    @property
    def shape(self) -> GPTSize:
        return GPT_SIZES[self.size]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ByteGPTWorkload:
        body = dict(values)
        kind = body.pop("kind", None)
        if kind != cls.kind:
            raise SettingsError("kind", f"expected {cls.kind!r}, found {kind!r}")
        try:
            return cls(**body)
        except TypeError as error:
            raise SettingsError("workload", str(error)) from None
