"""Weights of a run as a model that Transformers' ``from_pretrained`` loads, made without torch.

What the ``huggingface`` workload leaves is almost that: weights under Transformers' own names, and
beside final weights the ``config.json``. Added here: the header word by which Transformers knows a
file of PyTorch's (``format: pt``; the tensors' bytes stay as they are), the tokenizer's files, and
for a checkpoint the config, where the workload says it. Memory does not grow with the model: the
weights pass a piece at a time.

What cannot be had (a tokenizer that lies on the replicas' disks, a gated repository) is said and
left out. Left out too: other workloads, which are no models of Transformers, and the few models
whose weights Transformers converts while it saves them (fused experts); for those there is
``python -m diloco.export``.

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

from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import BYTES, VOCABULARY, HuggingFaceWorkload
from diloco.store.base import Store
from executors.base import ExecutorError
from runs.ingest.objects import check_named, fetch
from runs.models import Checkpoint

TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
     "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
     "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"}
)  # fmt: skip
_HEADER_LIMIT = 100_000_000
"""As safetensors has it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Another model's files: their names, and one of them as a path."""

    names: Callable[[str, str], list[str]]
    get: Callable[[str, str, str], Path]
    """(repository, revision, file)."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Files beside the weights, and in words what is missing and why."""

    files: Mapping[str, Path | bytes]
    missing: tuple[str, ...] = ()


def workload_of(checkpoint: Checkpoint) -> HuggingFaceWorkload | None:
    """None for another workload, or one of a version to come."""
    if checkpoint.run.workload.get("kind") != HuggingFaceWorkload.kind:
        return None
    try:
        return HuggingFaceWorkload.from_dict(checkpoint.run.workload)
    except SettingsError:
        return None


def extra_files(
    workload: HuggingFaceWorkload, config: bytes | None, source: Source, secrets: tuple[str, ...]
) -> Extra:
    """``config`` is the final weights' own, None for a checkpoint. Raises nothing of the Hub's:
    what it refuses is missing."""
    files: dict[str, Path | bytes] = {}
    missing = []
    if config is None:
        try:
            config = _config(workload, source)
        except (ExecutorError, OSError) as error:
            missing.append(f"config.json of {workload.model}: {_said(error, secrets)}")
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
            wanted = sorted(TOKENIZER_FILES.intersection(source.names(name, revision)))
            files |= {file: source.get(name, revision, file) for file in wanted}
            if not wanted:
                missing.append(f"the tokenizer: {name} has none of its files")
        except (ExecutorError, OSError) as error:
            missing.append(f"the tokenizer {name}: {_said(error, secrets)}")
    return Extra(files=files, missing=tuple(missing))


def _said(error: Exception, secrets: tuple[str, ...]) -> str:
    words = str(error)
    for secret in secrets:
        words = words.replace(secret, "•••") if secret else words
    return words


def _config(workload: HuggingFaceWorkload, source: Source) -> bytes | None:
    """A checkpoint's: the base model's own, or what the workload says."""
    if workload.model:
        if workload.model.startswith(("/", ".", "~")):
            return None
        return source.get(workload.model, workload.revision, "config.json").read_bytes()
    if workload.tokenizer_name == BYTES:
        decided = {"vocab_size": VOCABULARY, **dict.fromkeys(_SPECIAL)}
    elif {"vocab_size", *_SPECIAL} <= set(workload.config):
        decided = {}
    else:
        return None
    return json.dumps({**decided, **workload.config}, indent=2, sort_keys=True).encode()


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def byte_tokenizer_files() -> dict[str, bytes]:
    """The files of :func:`diloco.workloads.tokens.byte_tokenizer`, in which every byte is the token
    of its own number. GPT-2's characters stand for bytes: printable ones for themselves, the others
    from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary, spare = {}, 0x100
    for byte in range(VOCABULARY):
        vocabulary[chr(byte if byte in printable else spare)] = byte
        spare += byte not in printable
    level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
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
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
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
    """The weights into ``path``; with ``as_model`` their header says ``format: pt``. Either way the
    digest of what lies in the bucket is checked."""
    check_named(checkpoint)
    header = _header(store, checkpoint.key) if as_model else None
    with path.open("wb") as file:
        into: Any = file
        if header is not None:
            size, fields = header
            meta = {"format": "pt", **fields.get("__metadata__", {})}
            text = json.dumps({"__metadata__": meta, **_without(fields)}, separators=(",", ":"))
            body = text.encode()
            body += b" " * (-len(body) % 8)  # tensors stay aligned
            file.write(struct.pack("<Q", len(body)) + body)
            into = _Behind(file, 8 + size)
        fetch(
            store, checkpoint.key, into,
            size_bytes=checkpoint.size_bytes, sha256=checkpoint.digest,
        )  # fmt: skip


def _header(store: Store, key: str) -> tuple[int, dict[str, Any]] | None:
    """Size and content of a safetensors header; None for what has none."""
    first = store.get_range(key, 0, 8)
    if len(first) < 8:
        return None
    (size,) = struct.unpack("<Q", first)
    if not 2 <= size <= _HEADER_LIMIT:
        return None
    try:
        fields = json.loads(store.get_range(key, 8, size))
    except ValueError:
        return None
    return (size, fields) if isinstance(fields, dict) else None


def _without(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "__metadata__"}


class _Behind:
    """Writes what comes after the first ``skip`` bytes."""

    def __init__(self, file: BinaryIO, skip: int) -> None:
        self._file, self._skip = file, skip

    def write(self, piece: bytes) -> int:
        skipped = min(self._skip, len(piece))
        self._skip -= skipped
        self._file.write(memoryview(piece)[skipped:])
        return len(piece)
