"""A tiny base model, its tokenizer and generated data, so that the recipes need no download.

    python examples/recipes/tiny.py FOLDER

trains a Llama of 22,500 parameters on generated sentences for some seconds and saves it with its
tokenizer to FOLDER/base. Recipes that fine-tune it do so on the same sentences in reversed order.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ARTICLES = ["the", "a", "every"]
ADJECTIVES = ["old", "small", "red", "quiet", "bright"]
NOUNS = ["fox", "tree", "river", "child", "house", "stone", "bird"]
VERBS = ["sees", "finds", "likes", "paints", "crosses", "leaves"]
PLACES = ["near", "behind", "under"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [*SPECIAL, ".", *ARTICLES, *ADJECTIVES, *NOUNS, *VERBS, *PLACES]
CONTEXT = 32
HELD_OUT = 10_000
"""A shard of sentences that no replica trains on."""


def sentence(choose: random.Random, *, reverse: bool) -> list[str]:
    def thing() -> list[str]:
        return [choose.choice(ARTICLES), choose.choice(ADJECTIVES), choose.choice(NOUNS)]

    words = [*thing(), choose.choice(VERBS), *thing(), choose.choice(PLACES), *thing()]
    return [*(reversed(words) if reverse else words), "."]


def texts(shard: int, count: int, *, reverse: bool = True) -> list[str]:
    """Return sentences of a shard, several in each text, so that a text has CONTEXT words."""
    choose = random.Random(f"{shard} {reverse}")
    words: list[str] = []
    while len(words) < count * CONTEXT:
        words += sentence(choose, reverse=reverse)
    return [" ".join(words[n * CONTEXT : (n + 1) * CONTEXT]) for n in range(count)]


def rows(shard: int, count: int = 4096) -> list[dict[str, Tensor]]:
    """Return the texts of a shard as token ids (CONTEXT,) int64, which are also the labels."""
    number = {word: index for index, word in enumerate(WORDS)}
    ids = [torch.tensor([number[word] for word in text.split()]) for text in texts(shard, count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in ids]


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Return the mean loss in nats per token of a causal language model on held-out sentences."""
    tokens = torch.stack([row["input_ids"] for row in rows(HELD_OUT, 64)])
    was_training = model.training
    model.eval()
    loss: Tensor = model(input_ids=tokens, labels=tokens)["loss"]
    model.train(was_training)
    return float(loss)


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of the weights, which is equal on all replicas at the end."""
    content = hashlib.sha256()
    for name in sorted(tensors):
        content.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()[:16]


def base_model(seed: int = 0, steps: int = 200) -> Any:
    """Train the base model on sentences in their usual order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    number = {word: index for index, word in enumerate(WORDS)}
    data = [
        torch.tensor([number[word] for word in text.split()])
        for text in texts(0, 16 * steps, reverse=False)
    ]
    for step in range(steps):
        tokens = torch.stack(data[16 * step : 16 * step + 16])
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))  # noqa: S106
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    )


def prepare(folder: Path) -> Path:
    """Write the base model and its tokenizer to ``folder/base``; return that path."""
    base = folder / "base"
    base_model().save_pretrained(base)
    tokenizer().save_pretrained(base)
    return base


if __name__ == "__main__":
    print(prepare(Path(sys.argv[1])))
