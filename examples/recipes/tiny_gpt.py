"""A small GPT in plain PyTorch, for the recipes that bring their own model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    context: int = 32
    width: int = 32
    heads: int = 2
    layers: int = 2


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, time, width = x.shape
        projected = self.attention(self.norm_1(x)).view(rows, time, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, time, width))
        hidden = nn.functional.gelu(self.expand(self.norm_2(x)))
        result: Tensor = x + self.contract(hidden)
        return result


class GPT(nn.Module):
    """Predicts the next token; ``forward`` returns logits (rows, time, vocabulary)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize all parameters, e.g. of a model created on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss in nats of predicting tokens (rows, time) from the ones before."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
