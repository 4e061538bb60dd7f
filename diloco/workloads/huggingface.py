"""The ``huggingface`` workload: any causal language model of the Transformers library.

The model is created from a ``config``, with weights from the group's seed, or loaded from a
checkpoint: a directory or a name on the Hub. Only safetensors are loaded, and no remote code is
executed. Weights are fp32; on a GPU, autocast runs passes in bf16. Dropout is a function of (seed,
replica, step).

Not supported: auxiliary losses of the model (mixtures of experts), adapters, and a key-value cache
in :meth:`HuggingFaceTraining.sample`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import SHARDS, HuggingFaceWorkload
from diloco.workloads.base import (
    HeldOutLoss,
)
from diloco.workloads.documents import load_tokens
from diloco.workloads.sharded import (
    RandomWindows,
    Tokens,
    TrainingData,
    load_shards,
)
from diloco.workloads.text_training import TextTraining
from diloco.workloads.tokens import Tokenizer, load_tokenizer, pretrained

_EVALUATED_TOGETHER = 8
"""Windows per forward pass of an evaluation: a constant, so that no setting changes the result."""


class Batch(NamedTuple):
    """``tokens``: (batch_size, context + 1) int64; the targets are the inputs shifted by one."""

    step: int
    tokens: Tensor


def load_training(
    workload: HuggingFaceWorkload,
    settings: GroupSettings,
    *,
    replica: int,
    device: torch.device,
) -> HuggingFaceTraining:
    """Load the workload of one replica. Raises :class:`SettingsError` if the tokenizer, the model
    or the data cannot be loaded."""
    tokenizer = load_tokenizer(workload.tokenizer_name, revision=_revision(workload))
    config = model_config(workload, tokenizer)
    train, held_out = _load_data(
        workload, settings, tokenizer, replica=replica, vocabulary=config.vocab_size
    )
    return HuggingFaceTraining(
        workload, settings, config, tokenizer, train, held_out, replica=replica, device=device
    )


def _load_data(
    workload: HuggingFaceWorkload,
    settings: GroupSettings,
    tokenizer: Tokenizer,
    *,
    replica: int,
    vocabulary: int,
) -> tuple[TrainingData, Tokens]:
    """Return the training data and the held-out windows of one replica."""
    context, tokens = workload.context, workload.eval_tokens
    if workload.data_format == SHARDS:
        return load_shards(
            workload.data,
            settings,
            replica=replica,
            context=context,
            eval_tokens=tokens,
            vocabulary=vocabulary,
            digest=tokenizer.digest,
            coverage=workload.data_coverage,
        )
    corpus = load_tokens(workload, tokenizer, shard=replica, shards=settings.max_replicas)
    train = RandomWindows(corpus.train, settings, replica=replica, context=context)
    return train, corpus.held_out


def model_config(workload: HuggingFaceWorkload, tokenizer: Tokenizer) -> Any:
    """Return the Transformers configuration of the model. A ``config`` of the workload can omit
    fields that the tokenizer determines."""
    if workload.model:
        name = workload.model
        config = pretrained(
            "model", name, lambda **how: AutoConfig.from_pretrained(name, **how), workload.revision
        )
    else:
        special = {
            key: getattr(tokenizer.transformer, key)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        try:
            config = AutoConfig.for_model(
                **{"vocab_size": tokenizer.size, **special, **workload.config}
            )
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError("config", f"expected a model's configuration: {error}") from error
    if tokenizer.size > config.vocab_size:
        raise SettingsError(
            "tokenizer",
            f"expected at most the model's {config.vocab_size:,} tokens, found {tokenizer.size:,}",
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and workload.context > longest:
        raise SettingsError(
            "context", f"expected at most the model's {longest:,}, found {workload.context:,}"
        )
    return config


class HuggingFaceTraining(TextTraining):
    """:class:`~diloco.workloads.base.Workload` of one replica: a causal model on a token shard."""

    def __init__(
        self,
        workload: HuggingFaceWorkload,
        settings: GroupSettings,
        config: Any,
        tokenizer: Tokenizer,
        train: TrainingData,
        held_out: Tokens,
        *,
        replica: int,
        device: torch.device,
    ) -> None:
        super().__init__(settings, train, data=workload.data, device=device)
        self._workload = workload
        self._config = config
        self._tokenizer = tokenizer
        self._replica = replica
        self._held_out = torch.from_numpy(held_out.astype(np.int32))

    def build_model(self) -> nn.Module:
        with self._random(self._settings.seed):
            model = self._new_model()
        return model.to(self._device, torch.float32).train()

    def _new_model(self) -> nn.Module:
        if not self._workload.model:
            fresh: nn.Module = AutoModelForCausalLM.from_config(self._config)
            return fresh
        name = self._workload.model
        loaded: nn.Module = pretrained(
            "model",
            name,
            lambda **how: AutoModelForCausalLM.from_pretrained(
                name, config=self._config, dtype=torch.float32, use_safetensors=True, **how
            ),
            self._workload.revision,
        )
        return loaded

    def train_batch(self, step: int) -> Batch:
        """Return samples of the replica's part of the data."""
        windows = torch.from_numpy(self._train.batch(step).astype(np.int32))
        return Batch(step, self._to_device(windows))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not model.training:
            return self._loss(model, batch.tokens)
        seeds = np.random.SeedSequence([self._settings.seed, self._replica, batch.step])
        with self._random(int(seeds.generate_state(1)[0])):
            return self._loss(model, batch.tokens)

    def _loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        with self._autocast():
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def tokens(self, batch: Batch) -> int:
        return batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> HeldOutLoss:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count = 0
        with _evaluating(model):
            for start in range(0, len(self._held_out), _EVALUATED_TOGETHER):
                windows = self._to_device(self._held_out[start : start + _EVALUATED_TOGETHER])
                predicted = windows.shape[0] * (windows.shape[1] - 1)
                total += self._loss(model, windows).double() * predicted
                count += predicted
        return HeldOutLoss(loss=float(total) / count, tokens=count)

    def config(self) -> Mapping[str, Any]:
        """Return the configuration that ``from_pretrained`` reads."""
        name = AutoModelForCausalLM._model_mapping[type(self._config)].__name__
        return {**self._config.to_dict(), "architectures": [name]}

    @torch.no_grad()
    def go_on(
        self, model: nn.Module, prompt: bytes, n: int, *, temperature: float, seed: int
    ) -> Iterator[bytes]:
        """Yield the text so far after each token (:class:`~diloco.training.sample.GoOn`)."""
        generator = torch.Generator().manual_seed(seed)
        (start,) = self._tokenizer.encode([prompt.decode(errors="replace") or "\n"])
        seen = [int(token) for token in start]
        if not seen and self._tokenizer.end is not None:
            seen = [self._tokenizer.end]  # the tokenizer strips leading white space
        first = len(seen)
        text = b""
        with _evaluating(model):
            while len(text) < n:
                window = torch.tensor([seen[-self._workload.context :]], device=self._device)
                logits = model(input_ids=window, use_cache=False).logits[0, -1].float().cpu()
                if temperature == 0:
                    token = int(logits.argmax())
                else:
                    odds = torch.softmax(logits / temperature, dim=-1)
                    token = int(torch.multinomial(odds, 1, generator=generator))
                if token == self._tokenizer.end:
                    break
                seen.append(token)
                text = self._tokenizer.decode(seen[first:])
                yield text

    @contextlib.contextmanager
    def _random(self, seed: int) -> Iterator[None]:
        """Seed torch's random state inside the block and restore it afterwards."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield


def _revision(workload: HuggingFaceWorkload) -> str:
    """Return the revision of the tokenizer: the model's, if the tokenizer is the model's."""
    return "" if workload.tokenizer else workload.revision


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
