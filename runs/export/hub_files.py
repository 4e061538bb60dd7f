"""Converts a run's weights to a model for Transformers' ``from_pretrained``, without torch.

The ``huggingface`` workload already writes weights under Transformers' names, and a ``config.json``
next to final weights. This module adds the header field that marks a PyTorch file (``format: pt``;
the tensors' bytes are unchanged), the tokenizer's files, and for a checkpoint the config if the
workload defines it. The weights are streamed, so memory does not grow with the model.

Unavailable files (a tokenizer on the replicas' disks, a gated repository) are reported and left
out. Not supported: other workloads, which are not Transformers models, and the few models whose
weights Transformers converts when saving (fused experts); use ``python -m diloco.export`` for
those.

Formats: https://huggingface.co/docs/safetensors/index#format,
https://huggingface.co/docs/tokenizers/pipeline (``tokenizer.json``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from diloco.protocol.pieces import read_range
from diloco.protocol.records import StoredObject
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import BYTES, VOCABULARY, HuggingFaceWorkload
from diloco.store.base import Store
from executors.base import ExecutorError
from runs.ingest.objects import check_named, fetch, weights_of
from runs.models import Checkpoint

TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        "chat_template.jinja",
        "chat_template.json",
    }
)
_HEADER_LIMIT = 100_000_000
"""The limit of safetensors."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Access to another repository: list its files, and download one."""

    names: Callable[[str, str], list[str]]
    get: Callable[[str, str, str], Path]
    """(repository, revision, file)."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Files next to the weights, and descriptions of missing ones with the reason."""

    files: Mapping[str, Path | bytes]
    missing: tuple[str, ...] = ()


def workload_of(checkpoint: Checkpoint) -> HuggingFaceWorkload | None:
    """The checkpoint's workload; None if it is of another kind or a future version."""
    if checkpoint.run.workload.get("kind") != HuggingFaceWorkload.kind:
        return None
    try:
        return HuggingFaceWorkload.from_dict(checkpoint.run.workload)
    except SettingsError:
        return None


def extra_files(
    workload: HuggingFaceWorkload, config: bytes | None, source: Source, secrets: tuple[str, ...]
) -> Extra:
    """Collect config and tokenizer. ``config`` is that of the final weights, None for a checkpoint.

    Does not raise errors of the Hub: what it refuses is listed as missing.
    """
    files: dict[str, Path | bytes] = {}
    missing = []
    if config is None:
        try:
            config = _config(workload, source)
        except (ExecutorError, OSError) as error:
            missing.append(f"config.json of {workload.model}: {_redacted(error, secrets)}")
        else:
            if config is None:
                missing.append("config.json: the workload leaves its vocabulary to the tokenizer")
    if config is not None:
        files["config.json"] = config
    name = workload.tokenizer_name
    if name == BYTES:
        files |= byte_tokenizer_files()
    elif name.startswith(("/", ".", "~")):
        missing.append(f"the tokenizer: {name} is a directory of the replicas")
    else:
        revision = "" if workload.tokenizer else workload.revision
        try:
            available = sorted(TOKENIZER_FILES.intersection(source.names(name, revision)))
            files |= {file: source.get(name, revision, file) for file in available}
            if not available:
                missing.append(f"the tokenizer: {name} has none of its files")
        except (ExecutorError, OSError) as error:
            missing.append(f"the tokenizer {name}: {_redacted(error, secrets)}")
    return Extra(files=files, missing=tuple(missing))


def _redacted(error: Exception, secrets: tuple[str, ...]) -> str:
    text = str(error)
    for secret in secrets:
        text = text.replace(secret, "•••") if secret else text
    return text


def _config(workload: HuggingFaceWorkload, source: Source) -> bytes | None:
    """The config of a checkpoint: the base model's, or the one that the workload defines."""
    if workload.model:
        if workload.model.startswith(("/", ".", "~")):
            return None
        return source.get(workload.model, workload.revision, "config.json").read_bytes()
    if workload.tokenizer_name == BYTES:
        defaults = {"vocab_size": VOCABULARY, **dict.fromkeys(_SPECIAL)}
    elif {"vocab_size", *_SPECIAL} <= set(workload.config):
        defaults = {}
    else:
        return None
    return json.dumps({**defaults, **workload.config}, indent=2, sort_keys=True).encode()


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def byte_tokenizer_files() -> dict[str, bytes]:
    """The files of :func:`diloco.workloads.tokens.byte_tokenizer`, in which each byte is the token
    with its own number. As in GPT-2, characters represent bytes: printable ones themselves, others
    from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary, spare = {}, 0x100
    for byte in range(VOCABULARY):
        vocabulary[chr(byte if byte in printable else spare)] = byte
        spare += byte not in printable
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=2).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }


def fetch_weights(store: Store, checkpoint: Checkpoint, path: Path, *, as_model: bool) -> None:
    """Download the weights to ``path``; ``as_model`` adds ``format: pt`` to their header. The
    digest of the bucket's object is verified in both cases."""
    check_named(checkpoint)
    stored = weights_of(store, checkpoint)
    header = _header(store, stored) if as_model else None
    with path.open("wb") as file:
        into: Any = file
        if header is not None:
            size, fields = header
            meta = {"format": "pt", **fields.get("__metadata__", {})}
            text = json.dumps({"__metadata__": meta, **_without(fields)}, separators=(",", ":"))
            body = text.encode()
            body += b" " * (-len(body) % 8)  # tensors stay aligned
            file.write(struct.pack("<Q", len(body)) + body)
            into = _SkipStart(file, 8 + size)
        fetch(store, stored, into)


def _header(store: Store, stored: StoredObject) -> tuple[int, dict[str, Any]] | None:
    """Size and content of a safetensors header; None if there is none."""
    first = read_range(store, stored, 0, 8)
    if len(first) < 8:
        return None
    (size,) = struct.unpack("<Q", first)
    if not 2 <= size <= _HEADER_LIMIT:
        return None
    try:
        fields = json.loads(read_range(store, stored, 8, size))
    except ValueError:
        return None
    return (size, fields) if isinstance(fields, dict) else None


def _without(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "__metadata__"}


class _SkipStart:
    """A file that drops the first ``skip`` bytes."""

    def __init__(self, file: BinaryIO, skip: int) -> None:
        self._file, self._skip = file, skip

    def write(self, piece: bytes) -> int:
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        self._file.write(memoryview(piece)[skipped:])
        return len(piece)
