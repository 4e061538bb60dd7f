"""Tokenizers, and where they and models come from: a directory, the hub, or the bytes themselves.

The hub's own message reaches the person: a gated or absent repository says what to do about it.
Without a network nothing waits for retries; what the hub's cache holds is used.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from huggingface_hub import constants
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import BYTES, VOCABULARY

T = TypeVar("T")

_REACH_S = 5.0
"""How long the hub may take to give any answer before it counts as out of reach."""


class Tokenizer:
    """``transformer`` is Transformers' own object, which an export saves beside the weights."""

    def __init__(self, transformer: Any, *, is_bytes: bool = False) -> None:
        self.transformer = transformer
        self._is_bytes = is_bytes

    @property
    def size(self) -> int:
        """One more than the largest token number."""
        return len(self.transformer)

    @property
    def end(self) -> int | None:
        """The token after each document, if there is one."""
        end: int | None = self.transformer.eos_token_id
        return end

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Tokens of each text, without any that mark a beginning or an end."""
        if self._is_bytes:  # the same tokens a hundred times as fast
            return [
                np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32)
                for text in texts
            ]
        rows = self.transformer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [np.asarray(row, np.int32) for row in rows]

    def decode(self, tokens: Sequence[int]) -> bytes:
        if self._is_bytes:
            return bytes(token for token in tokens if token < VOCABULARY)
        text: str = self.transformer.decode(list(tokens))
        return text.encode()


def load_tokenizer(name: str, *, revision: str = "") -> Tokenizer:
    """The tokenizer called ``name``. :class:`SettingsError` where it cannot be had."""
    if name == BYTES:
        return Tokenizer(byte_tokenizer(), is_bytes=True)
    return Tokenizer(
        pretrained(
            "tokenizer", name, lambda **how: AutoTokenizer.from_pretrained(name, **how), revision
        )
    )


def byte_tokenizer() -> Any:
    """A tokenizer of Transformers for which every byte is the token of its own number."""
    # The 256 characters that stand for bytes, as GPT-2's tokenizer names them: printable ones for
    # themselves, the others from U+0100 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names, spare = {}, 0x100
    for byte in range(VOCABULARY):
        names[chr(byte if byte in printable else spare)] = byte
        spare += byte not in printable
    tokenizer = RustTokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def pretrained(field: str, name: str, load: Callable[..., T], revision: str = "") -> T:
    """What ``load`` finds under ``name``, a directory or a name on the hub.

    It is called with ``local_files_only`` and perhaps ``revision``. :class:`SettingsError` on
    ``field``, with the library's own message.
    """
    how: dict[str, Any] = {"local_files_only": Path(name).is_dir() or not hub_is_there()}
    if revision and not Path(name).is_dir():
        how["revision"] = revision
    try:
        return load(**how)
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise SettingsError(
            field, f"expected a directory or a name on the hub, found {name!r}: {error}"
        ) from error


def hub_is_there() -> bool:
    """Whether the hub gives any answer; never asked where HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_REACH_S):  # noqa: S310
            return True
    except urllib.error.HTTPError:
        return True  # it has answered
    except OSError:
        return False
