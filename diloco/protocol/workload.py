"""Describes the trained workload without torch, for the form, the planner and the replica.

A workload document is the ``workload`` object of ``group.json``; its ``kind`` selects the class
here, and the module of that name in :mod:`diloco.workloads`, which has the model. The built-in
workload is the byte-level GPT; its sizes and parameter counts are here so that a page can show them
without torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from diloco.protocol.settings import SettingsError

VOCABULARY = 256
"""Byte-level: every byte is a token."""

STDLIB = "stdlib"
"""Data source: the source text of the Python standard library, which every machine has."""


@dataclass(frozen=True, kw_only=True)
class GPTSize:
    """Shape of a byte-level GPT: pre-norm blocks, rotary positions, tied embedding."""

    layers: int
    width: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        """Number of trained parameters; a test compares it with the model."""
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


SHARDS = "shards"
"""Data format: token shards, written by ``python -m diloco.tokenize``."""


@dataclass(frozen=True, kw_only=True)
class WorkloadDocument:
    """Base class of the workload documents; ``kind`` selects the class."""

    kind: ClassVar[str]
    model_fields: ClassVar[tuple[str, ...]]
    """Fields that define the model: a fork keeps them."""
    is_language_model: ClassVar[bool] = False
    """Whether texts and benchmark tasks can be evaluated: the tokenizer is known."""
    extra: ClassVar[str] = ""
    """The extra of this package that installs the libraries of the workload; '' if it needs
    none."""

    @property
    def data_uri(self) -> str:
        """The URI of the data, for checks before a launch; '' if it has none."""
        return ""

    @property
    def is_sharded(self) -> bool:
        """Whether the data is token shards."""
        return getattr(self, "data_format", "") == SHARDS

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the document."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse and validate a document. Raises :class:`SettingsError`."""
        body = dict(values)
        kind = body.pop("kind", None)
        if kind != cls.kind:
            raise SettingsError("kind", f"expected {cls.kind!r}, found {kind!r}")
        try:
            return cls(**body)
        except TypeError as error:
            raise SettingsError("workload", str(error)) from None


TEXT_FORMATS = ("text", SHARDS)

BY_REPLICA, BY_UNITS = "replica", "units"
COVERAGES = (BY_REPLICA, BY_UNITS)
"""How an epoch of token shards is divided: by replica number, or in work units that replicas claim
through the bucket, so that each sample is seen exactly once."""


@dataclass(frozen=True, kw_only=True)
class ByteGPTWorkload(WorkloadDocument):
    """The built-in workload: a byte-level GPT on text.

    ``data`` is :data:`STDLIB` or an fsspec URI of a file, a folder or a glob; with ``data_format``
    :data:`SHARDS`, the URI of token shards of bytes, divided by ``data_coverage``. ``eval_bytes``
    is the amount of held-out text that one evaluation reads.
    """

    size: str = "demo"
    data: str = STDLIB
    data_format: str = "text"
    data_coverage: str = BY_REPLICA
    eval_bytes: int = 65_536

    kind: ClassVar[str] = "byte_gpt"
    model_fields: ClassVar[tuple[str, ...]] = ("size",)
    is_language_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.size not in GPT_SIZES:
            raise SettingsError(
                "size", f"expected one of {', '.join(GPT_SIZES)}, found {self.size!r}"
            )
        if not isinstance(self.data, str) or not self.data.strip():
            raise SettingsError("data", f"expected {STDLIB!r} or a URI, found {self.data!r}")
        if self.data_format not in TEXT_FORMATS:
            expected = ", ".join(TEXT_FORMATS)
            raise SettingsError(
                "data_format", f"expected one of {expected}, found {self.data_format!r}"
            )
        _check_shards(self.data, self.data_format, self.data_coverage)
        if not isinstance(self.eval_bytes, int) or self.eval_bytes < 1:
            raise SettingsError("eval_bytes", f"expected 1 or more, found {self.eval_bytes!r}")

    @property
    def shape(self) -> GPTSize:
        return GPT_SIZES[self.size]

    @property
    def data_uri(self) -> str:
        return self.data


def _check_shards(data: str, data_format: str, coverage: str) -> None:
    if coverage not in COVERAGES:
        expected = ", ".join(COVERAGES)
        raise SettingsError("data_coverage", f"expected one of {expected}, found {coverage!r}")
    if coverage == BY_UNITS and data_format != SHARDS:
        raise SettingsError(
            "data_coverage",
            f"expected data_format {SHARDS!r} for {BY_UNITS!r}, found {data_format!r}",
        )
    if data_format == SHARDS and data == STDLIB:
        raise SettingsError(
            "data", "expected the URI of token shards, written by python -m diloco.tokenize"
        )


BYTES = "bytes"
"""Tokenizer: every byte is a token."""

DATA_FORMATS = ("auto", "text", "json", "parquet", "csv", "dataset", SHARDS)
"""``auto`` selects by file name; a name that is neither file nor URI is a data set of the Hub."""


@dataclass(frozen=True, kw_only=True)
class HuggingFaceWorkload(WorkloadDocument):
    """A causal language model of the Transformers library, on text.

    Set exactly one of ``model`` (a checkpoint's directory or a name on the Hub, with ``revision``)
    and ``config`` (``config.json`` as an object; the weights are initialized from the group's
    seed).

    ``tokenizer`` is a directory, a name on the Hub or :data:`BYTES`; by default the model's own,
    and bytes for a ``config``. ``data`` is :data:`STDLIB`, an fsspec URI of files (a folder or a
    glob too) or the name of a data set on the Hub, of which ``data_config`` and ``data_split``
    select a part; with ``data_format`` :data:`SHARDS`, the URI of token shards of this tokenizer,
    divided by ``data_coverage``.
    ``text_column`` is the column with the text. ``documents`` limits the documents,
    from the start; 0 is no limit. ``context`` and ``eval_tokens`` are in tokens.
    """

    model: str = ""
    revision: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    context: int = 256
    data: str = STDLIB
    data_format: str = "auto"
    data_coverage: str = BY_REPLICA
    data_config: str = ""
    data_split: str = "train"
    text_column: str = "text"
    documents: int = 0
    eval_tokens: int = 65_536

    kind: ClassVar[str] = "huggingface"
    model_fields: ClassVar[tuple[str, ...]] = ("model", "revision", "config")
    is_language_model: ClassVar[bool] = True
    extra: ClassVar[str] = "transformers"

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if spec.name == "config":
                if not isinstance(value, Mapping):
                    raise SettingsError("config", f"expected an object, found {value!r}")
            elif not isinstance(value, type(spec.default)) or isinstance(value, bool):
                kind = "text" if isinstance(spec.default, str) else "a whole number"
                raise SettingsError(spec.name, f"expected {kind}, found {value!r}")
        if bool(self.model) == bool(self.config):
            found = "both" if self.model else "neither"
            raise SettingsError("model", f"expected either 'model' or 'config', found {found}")
        if self.config and not isinstance(self.config.get("model_type"), str):
            found = repr(self.config.get("model_type"))
            raise SettingsError(
                "config", f"expected a 'model_type', such as 'llama', found {found}"
            )
        if self.revision and not self.model:
            raise SettingsError("revision", f"expected one of a 'model', found {self.revision!r}")
        if not self.data.strip():
            raise SettingsError(
                "data", f"expected {STDLIB!r}, a URI or a name, found {self.data!r}"
            )
        if self.data_format not in DATA_FORMATS:
            expected = ", ".join(DATA_FORMATS)
            raise SettingsError(
                "data_format", f"expected one of {expected}, found {self.data_format!r}"
            )
        _check_shards(self.data, self.data_format, self.data_coverage)
        for name, least in (("context", 1), ("eval_tokens", 1), ("documents", 0)):
            if getattr(self, name) < least:
                raise SettingsError(
                    name, f"expected {least} or more, found {getattr(self, name)!r}"
                )

    @property
    def data_uri(self) -> str:
        """'' for the name of a data set on the Hub."""
        return self.data if self.is_sharded or "://" in self.data else ""

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or self.model or BYTES


_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True, kw_only=True)
class CustomWorkload(WorkloadDocument):
    """A user's model, data and loss: a function that builds a workload
    (:mod:`diloco.workloads.custom` defines its arguments and its result).

    ``function`` is ``package.module:name`` with keyword ``arguments``. ``archive`` is the sha256 of
    a zip under ``code/`` that contains the module, empty where the module is installed or on the
    path; ``requirements`` are its pip requirements. The launcher of the replicas provides both.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    archive: str = ""
    requirements: tuple[str, ...] = ()

    kind: ClassVar[str] = "custom"
    model_fields: ClassVar[tuple[str, ...]] = ("function",)

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) or not _FUNCTION.fullmatch(self.function):
            raise SettingsError(
                "function", f"expected 'package.module:function', found {self.function!r}"
            )
        if not isinstance(self.arguments, Mapping):
            raise SettingsError("arguments", f"expected an object, found {self.arguments!r}")
        is_digest = isinstance(self.archive, str) and re.fullmatch("([0-9a-f]{64})?", self.archive)
        if not is_digest:
            raise SettingsError(
                "archive", f"expected a sha256 in hexadecimal or nothing, found {self.archive!r}"
            )
        if not isinstance(self.requirements, list | tuple):
            raise SettingsError("requirements", f"expected a list, found {self.requirements!r}")
        for line in self.requirements:
            # An option such as --index-url is not a requirement.
            plain = isinstance(line, str) and line.strip() == line and line.isprintable()
            if not plain or not line or line.startswith("-"):
                raise SettingsError(
                    "requirements",
                    f"expected pip requirements, such as 'einops==0.8', found {line!r}",
                )
        object.__setattr__(self, "requirements", tuple(self.requirements))

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "requirements": list(self.requirements)}


WORKLOADS: dict[str, type[WorkloadDocument]] = {
    workload.kind: workload
    for workload in (
        ByteGPTWorkload,
        HuggingFaceWorkload,
        CustomWorkload,
    )
}
"""Workload classes by ``kind``."""
