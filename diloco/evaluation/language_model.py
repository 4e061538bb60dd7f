"""A trained language model with its tokenizer, for measurements on any tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import SettingsError
from diloco.protocol.workload import BYTES, VOCABULARY, ByteGPTWorkload, HuggingFaceWorkload
from diloco.workloads.byte_gpt import model_config, model_from_config


class TextCodec(Protocol):
    """Converts text to tokens and back. ``end`` separates texts; None if there is no such token."""

    @property
    def end(self) -> int | None: ...

    @property
    def digest(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> Sequence[Any]: ...

    def decode(self, tokens: Sequence[int]) -> bytes: ...


class Bytes:
    """Every byte is a token. Texts are separated by a line feed."""

    end = ord("\n")
    digest = BYTES

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        return [text.encode(errors="replace") for text in texts]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model and its tokenizer. ``context`` is the largest number of tokens of an input."""

    module: nn.Module
    codec: TextCodec
    context: int
    vocabulary: int
    device: torch.device
    call: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Map tokens, (batch, time) int64 on the device, to logits, (batch, time, vocabulary)
        fp32."""
        cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext():
            result = self.call(tokens)
        return result.float()


def language_model(
    document: GroupDocument, *, device: torch.device, module: nn.Module | None = None
) -> LanguageModel:
    """Create the model of a run's workload, untrained, or describe ``module``, which is one.

    Raises :class:`SettingsError` for a workload whose model has no known tokens.
    """
    kind = document.workload.get("kind")
    if kind == ByteGPTWorkload.kind:
        own = ByteGPTWorkload.from_dict(document.workload)
        gpt = module or model_from_config(model_config(own)).to(device)
        return LanguageModel(
            module=gpt.eval(),
            codec=Bytes(),
            context=own.shape.context,
            vocabulary=VOCABULARY,
            device=device,
            call=gpt,
        )
    if kind == HuggingFaceWorkload.kind:
        return _transformers_model(document, device, module)
    raise SettingsError(
        "workload",
        f"expected a workload of kind {ByteGPTWorkload.kind} or {HuggingFaceWorkload.kind}, whose "
        f"tokenizer is known, found {kind!r}; evaluate it on its own data, without data and tasks",
    )


def _transformers_model(
    document: GroupDocument, device: torch.device, module: nn.Module | None
) -> LanguageModel:
    from transformers import AutoModelForCausalLM

    from diloco.workloads.huggingface import model_config as transformers_config
    from diloco.workloads.tokens import load_tokenizer

    own = HuggingFaceWorkload.from_dict(document.workload)
    tokenizer = load_tokenizer(own.tokenizer_name, revision="" if own.tokenizer else own.revision)
    config = transformers_config(own, tokenizer)
    model = module or AutoModelForCausalLM.from_config(config).to(device, torch.float32)

    def call(tokens: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    return LanguageModel(
        module=model.eval(),
        codec=tokenizer,
        context=own.context,
        vocabulary=config.vocab_size,
        device=device,
        call=call,
    )
