"""The byte-level GPT: shape, determinism, schedule, and that it learns."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from diloco.model.inner_state import optimizers_of
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import GPT_SIZES, ByteGPTWorkload, GPTSize
from diloco.workloads import load_workload
from diloco.workloads.base import Workload, adamw, inner_optimizers, warmup_cosine
from diloco.workloads.byte_gpt import (
    ByteGPT,
    _rotate,
    model_config,
    model_from_config,
    sample_bytes,
)

SIZES = dict(GPT_SIZES)
TINY = GPTSize(layers=2, width=32, heads=2, context=32)


@pytest.fixture
def song(tmp_path: Path) -> Path:
    path = tmp_path / "song.txt"
    verses = (
        f"{n} green bottles hanging on the wall, and if one green bottle should fall,\n"
        for n in range(400, 0, -1)
    )
    path.write_text("".join(verses))
    return path


def workload_of(
    data: Path | str, *, replica: int = 0, eval_bytes: int = 1024, **settings: float
) -> Workload:
    chosen = {"warmup_steps": 5, "max_replicas": 4, **settings}
    document = GroupDocument(
        run_id="run",
        name="test",
        settings=GroupSettings(**chosen),  # type: ignore[arg-type]
        workload=ByteGPTWorkload(size="tiny", data=str(data), eval_bytes=eval_bytes).to_dict(),
    )
    return load_workload(document, replica=replica, device="cpu")


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPT_SIZES, "tiny", TINY)


@pytest.mark.parametrize("name", SIZES)
def test_the_parameter_count_matches_the_model(name: str) -> None:
    size = SIZES[name]
    with torch.device("meta"):
        model = ByteGPT(size)
    assert sum(p.numel() for p in model.parameters()) == size.parameters
    assert sum(t.numel() for t in model.state_dict().values()) == size.parameters
    assert size.width % size.heads == 0
    assert size.width // size.heads % 2 == 0


def test_sizes_match_the_documentation() -> None:
    counts = [size.parameters for size in SIZES.values()]
    assert SIZES["demo"].parameters <= 700_000
    assert 200_000 <= min(counts) <= 400_000
    assert 120e6 <= max(counts) <= 125e6


def test_weights_depend_only_on_the_seed(song: Path) -> None:
    torch.manual_seed(1)
    one = workload_of(song, seed=3).build_model().state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    other = workload_of(song, seed=3, replica=2).build_model().state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = workload_of(song, seed=4).build_model().state_dict()
    assert not torch.equal(one["embedding.weight"], third["embedding.weight"])


def test_an_untrained_model_has_the_loss_of_a_uniform_guess(song: Path) -> None:
    workload = workload_of(song)
    loss, tokens = workload.evaluate(workload.build_model())
    assert loss == pytest.approx(math.log(256), abs=0.1)
    assert tokens == 1024


def test_attention_is_causal() -> None:
    model = ByteGPT(TINY)
    model.initialise(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.dim() == 2 else None
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :20], other[:, :20])
    assert (one[:, 20:] - other[:, 20:]).abs().amax(dim=-1).min() > 1e-3


def test_rotary_attention_depends_on_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator).expand(2, 1, 32, 1, 16)
    rotation = ByteGPT(TINY).rotation
    scores = (_rotate(q, rotation) * _rotate(k, rotation).roll(3, dims=1)).sum(-1)[0, 3:]
    torch.testing.assert_close(scores, scores[:1].expand_as(scores))
    unturned = (q * k).sum(-1)[0, 3:]
    assert not torch.allclose(scores, unturned, atol=1e-2)


def test_batches_are_a_function_of_seed_replica_and_step(song: Path) -> None:
    one = workload_of(song, seed=1, replica=1, batch_size=4)
    later = [one.train_batch(step) for step in range(3)]
    again = workload_of(song, seed=1, replica=1, batch_size=4)
    assert torch.equal(again.train_batch(2), later[2])  # no step before it was needed
    assert torch.equal(again.train_batch(0), later[0])
    assert not torch.equal(later[0], later[1])
    for other in (
        workload_of(song, seed=2, replica=1, batch_size=4),
        workload_of(song, seed=1, replica=2, batch_size=4),
    ):
        assert not torch.equal(other.train_batch(0), later[0])
    assert later[0].shape == (4, TINY.context + 1)
    assert one.tokens(later[0]) == 4 * TINY.context


def test_batches_match_golden_values(song: Path) -> None:
    """A replica that is restarted with another NumPy must see the same data."""
    batch = workload_of(song, seed=7, replica=3, batch_size=2).train_batch(1000)
    assert [bytes(row[:12].tolist()) for row in batch] == [b"ottles hangi", b"s hanging on"]


def test_learning_rate_warms_up_and_decays_over_the_run() -> None:
    settings = GroupSettings(
        sync_every=10, total_rounds=10, warmup_steps=20, inner_lr=1.0, min_lr_ratio=0.1
    )
    rates = [warmup_cosine(step, settings) for step in range(settings.total_steps)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[9] == pytest.approx(0.5)
    assert rates[19] == pytest.approx(1.0)
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates.index(max(rates)) == 19
    assert all(a > b for a, b in itertools.pairwise(rates[19:]))
    assert warmup_cosine(10_000, settings) == pytest.approx(0.1)


def test_learning_rate_without_warmup_and_all_warmup() -> None:
    none = GroupSettings(sync_every=10, total_rounds=1, warmup_steps=0, inner_lr=1.0)
    assert 0.9 < warmup_cosine(0, none) < 1.0
    only = GroupSettings(sync_every=10, total_rounds=1, warmup_steps=10, inner_lr=1.0)
    assert warmup_cosine(9, only) == 1.0
    assert warmup_cosine(10, only) == pytest.approx(only.min_lr_ratio)


def test_only_matrices_decay() -> None:
    model = ByteGPT(TINY)
    decayed, spared = adamw(model, GroupSettings(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_muon_has_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = ByteGPT(TINY)
    settings = GroupSettings(inner_optimizer="muon", weight_decay=0.3)
    matrices, rest = inner_optimizers(torch.compile(model, backend="eager"), settings)
    assert isinstance(matrices, torch.optim.Muon) and isinstance(rest, torch.optim.AdamW)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    hidden = {name_of[id(p)] for group in matrices.param_groups for p in group["params"]}
    other = {name_of[id(p)] for group in rest.param_groups for p in group["params"]}
    assert hidden == {name for name in name_of.values() if name.startswith("blocks.")} - other
    assert all("norm" in name or name == "embedding.weight" for name in other)
    assert matrices.param_groups[0]["weight_decay"] == 0.3
    with pytest.raises(ValueError, match="expected a model with hidden matrices"):
        inner_optimizers(torch.nn.Embedding(3, 3), settings)


def test_muon_names_the_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"expected torch 2\.9 or newer for muon, found \d"):
        inner_optimizers(ByteGPT(TINY), GroupSettings(inner_optimizer="muon"))


@pytest.mark.parametrize("inner_optimizer", ["adamw", "muon"])
def test_training_reduces_the_loss(song: Path, inner_optimizer: str) -> None:
    workload = workload_of(
        song,
        sync_every=60,
        total_rounds=1,
        inner_lr=1e-2,
        batch_size=8,
        weight_decay=0.0,
        inner_optimizer=inner_optimizer,
    )
    model = workload.build_model()
    optimizers = optimizers_of(workload.inner_optimizer(model))
    before = workload.evaluate(model).loss
    for step in range(60):
        loss = workload.loss(model, workload.train_batch(step))
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = workload.lr_at(step)
            optimizer.step()
    after = workload.evaluate(model).loss
    assert before > 5.0
    assert after < 1.5
    text = sample_bytes(model, b"300 green bottles ha", 60, temperature=0.0, seed=0)
    assert b"bottle" in bytes(text)


def test_evaluation_does_not_depend_on_the_batch_size_and_leaves_the_model(song: Path) -> None:
    small, big = workload_of(song, batch_size=1), workload_of(song, batch_size=64, replica=3)
    model = small.build_model()
    assert small.evaluate(model) == big.evaluate(model)
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_bf16_autocast_reaches_the_attention_and_keeps_the_loss(song: Path) -> None:
    """What a GPU does, on the CPU: rotary positions are computed in fp32, mixing in bf16."""
    workload = workload_of(song)
    model = workload.build_model()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.dim() == 2 else None
    batch = workload.train_batch(0)
    exact = workload.loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch[:, :-1]).dtype == torch.bfloat16
        rough = workload.loss(model, batch)
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)
    rough.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_sampling_is_repeatable_and_goes_beyond_the_context(song: Path) -> None:
    workload = workload_of(song)
    model = workload.build_model()
    one = bytes(sample_bytes(model, b"x" * 100, 40, temperature=1.0, seed=5))
    assert len(one) == 40
    assert one == bytes(sample_bytes(model, b"x" * 100, 40, temperature=1.0, seed=5))
    assert one != bytes(sample_bytes(model, b"x" * 100, 40, temperature=1.0, seed=6))
    assert len(list(sample_bytes(model, b"", 3, temperature=0.0, seed=0))) == 3
    grown = list(workload.go_on(model, b"x" * 100, 40, temperature=1.0, seed=5))
    assert [len(text) for text in grown] == list(range(1, 41)) and grown[-1] == one
    assert workload.sample_prompt == "", "a song does not begin with a function"
    with pytest.raises(ValueError, match=r"temperature: expected 0 or more, found -1"):
        list(sample_bytes(model, b"", 1, temperature=-1, seed=0))


def test_config_builds_the_model_again(song: Path) -> None:
    workload = workload_of(song)
    model = model_from_config(workload.config())
    model.load_state_dict(workload.build_model().state_dict())
    config = model_config(ByteGPTWorkload(size="tiny", data=str(song)))
    with pytest.raises(ValueError, match=r"expected kind 'byte_gpt', found 'other'"):
        model_from_config({**config, "kind": "other"})
    with pytest.raises(ValueError, match=r"expected a whole number 'width', found '32'"):
        model_from_config({**config, "width": "32"})


def test_an_unknown_kind_and_a_replica_without_a_shard(song: Path) -> None:
    settings = GroupSettings(max_replicas=4)
    document = GroupDocument(run_id="r", name="n", settings=settings, workload={"kind": "caller"})
    kinds = "'byte_gpt' or 'huggingface' or 'custom'"
    with pytest.raises(SettingsError, match=f"expected kind {kinds}, found 'caller'"):
        load_workload(document, replica=0, device="cpu")
    with pytest.raises(ValueError, match=r"replica number from 0 to 3.*found 4"):
        workload_of(song, replica=4)
