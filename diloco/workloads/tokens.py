"""Load tokenizers and models from a directory or the Hugging Face Hub; a tokenizer of bytes.

Errors contain the Hub's own message, which explains e.g. how to get access to a gated repository.
Without a network, the Hub's local cache is used without waiting for retries.
"""

from __future__ import annotations

import hashlib
import json
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
"""Seconds without a response after which the Hub counts as unreachable."""


class Tokenizer:
    """A tokenizer; ``transformer`` is the Transformers object that an export saves."""

    def __init__(self, transformer: Any, *, is_bytes: bool = False) -> None:
        self.transformer = transformer
        self._is_bytes = is_bytes

    @property
    def size(self) -> int:
        """The largest token number plus one."""
        return len(self.transformer)

    @property
    def end(self) -> int | None:
        """The end-of-text token, if the tokenizer has one."""
        end: int | None = self.transformer.eos_token_id
        return end

    @property
    def digest(self) -> str:
        """Identifies the rules of the tokenizer: a sha256 in hexadecimal, :data:`BYTES` for
        bytes."""
        if self._is_bytes:
            return BYTES
        rules = getattr(self.transformer, "backend_tokenizer", None)
        text = rules.to_str() if rules else json.dumps(sorted(self.transformer.get_vocab().items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the tokens of each text, (tokens,) int32, without special tokens."""
        if self._is_bytes:  # equal tokens, a hundred times faster
            return [
                np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32)
                for text in texts
            ]
        rows = self.transformer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [np.asarray(row, np.int32) for row in rows]

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of ``tokens`` as UTF-8."""
        if self._is_bytes:
            return bytes(token for token in tokens if token < VOCABULARY)
        text: str = self.transformer.decode(list(tokens))
        return text.encode()


def load_tokenizer(name: str, *, revision: str = "") -> Tokenizer:
    """Load the tokenizer ``name``. Raises :class:`SettingsError` if it cannot be loaded."""
    if name == BYTES:
        return Tokenizer(byte_tokenizer(), is_bytes=True)
    return Tokenizer(
        pretrained(
            "tokenizer",
            name,
            lambda **options: AutoTokenizer.from_pretrained(name, **options),
            revision,
        )
    )


def byte_tokenizer() -> Any:
    """Create a Transformers tokenizer that maps every byte to the token of the same number."""
    # GPT-2's characters for the 256 bytes: printable bytes as themselves, the others from U+0100.
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
    """Call ``load`` for ``name``, a directory or a name on the Hub, and return its result.

    ``load`` gets the keyword arguments ``local_files_only`` and, if it is set, ``revision``. Raises
    :class:`SettingsError` on ``field``, with the library's message.
    """
    options: dict[str, Any] = {"local_files_only": Path(name).is_dir() or not hub_is_there()}
    if revision and not Path(name).is_dir():
        options["revision"] = revision
    try:
        return load(**options)
    except (OSError, ValueError) as error:  # the Hub's errors are OSErrors
        raise SettingsError(
            field, f"expected a directory or a name on the Hub, found {name!r}: {error}"
        ) from error


def hub_is_there() -> bool:
    """Return whether the Hub responds; False without a request if HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_REACH_S):  # noqa: S310
            return True
    except urllib.error.HTTPError:
        return True  # any response means that the Hub is reachable
    except OSError:
        return False
