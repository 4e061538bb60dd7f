"""Parameters of every kind round-trip through the flat vector: 0-dim, empty, frozen, tied,
non-contiguous, bf16, fp16 and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.codecs import get_codec
from diloco.model.flat_parameters import Layout
from diloco.protocol.payload_size import CODEC_SHAPES


class MixedParameters(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.embedding = nn.Embedding(5, 3)
        self.embedding.weight = nn.Parameter(random(5, 3))
        self.scalar = nn.Parameter(random())
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(random(7), requires_grad=False)
        self.transposed = nn.Parameter(random(3, 4).t())
        self.every_second = nn.Parameter(random(2, 10)[:, ::2])
        self.channels_last = nn.Parameter(random(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.brain = nn.Parameter(random(6, dtype=torch.bfloat16))
        self.half_wide = nn.Parameter(random(2, 3, dtype=torch.float16))
        self.wide = nn.Parameter(random(4, 2, dtype=torch.float64) / 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))


TRAINED = {  # in the model's order: direct parameters come before those of submodules
    "scalar": (),
    "nothing": (0, 4),
    "transposed": (4, 3),
    "every_second": (2, 5),
    "channels_last": (2, 3, 4, 5),
    "brain": (6,),
    "half_wide": (2, 3),
    "wide": (4, 2),
    "embedding.weight": (5, 3),
}
cuts = pytest.mark.parametrize(
    ("fragments", "pattern"), [(1, "strided"), (3, "strided"), (4, "sequential"), (2, "size")]
)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@cuts
def test_exactly_the_trained_parameters_have_a_slot(fragments: int, pattern: str) -> None:
    model = MixedParameters()
    assert not model.transposed.is_contiguous() and not model.every_second.is_contiguous()
    layout = Layout(model, fragments=fragments, pattern=pattern)
    assert {slot.name: slot.shape for slot in layout.slots} == TRAINED
    assert [slot.name for slot in layout.tensors] == list(TRAINED), "in the model's own order"
    assert layout.numel == sum(torch.Size(shape).numel() for shape in TRAINED.values())
    offsets = [slot.offset for slot in layout.slots] + [layout.numel]
    assert offsets == sorted(offsets) and offsets[0] == 0, "side by side"


@cuts
def test_read_has_every_value_in_logical_order(fragments: int, pattern: str) -> None:
    model = MixedParameters()
    layout = Layout(model, fragments=fragments, pattern=pattern)
    vector = layout.read()
    assert vector.dtype == torch.float32 and vector.shape == (layout.numel,)
    views = layout.split(vector)
    for name, parameter in parameters(model).items():
        if name != "frozen":
            assert views[name].shape == parameter.shape
            assert torch.equal(views[name], parameter.float()), name
    pieces = [layout.read(fragment) for fragment in range(fragments)]
    assert torch.equal(torch.cat(pieces), vector)


@cuts
def test_write_sets_every_value_and_keeps_dtype_stride_and_identity(
    fragments: int, pattern: str
) -> None:
    source, target = MixedParameters(seed=1), MixedParameters(seed=2)
    before = {name: (p.dtype, p.stride(), p.data_ptr()) for name, p in target.named_parameters()}
    frozen = target.frozen.clone()
    vector = Layout(source, fragments=fragments, pattern=pattern).read()
    layout = Layout(target, fragments=fragments, pattern=pattern)
    for fragment in range(fragments):
        span = layout.span(fragment)
        layout.write(vector[span.start : span.stop], fragment)
    after = {name: (p.dtype, p.stride(), p.data_ptr()) for name, p in target.named_parameters()}
    assert before == after
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.frozen, frozen)
    for name, parameter in parameters(target).items():
        if name not in ("frozen", "wide"):
            assert torch.equal(parameter, parameters(source)[name]), name
    assert torch.equal(target.wide, source.wide.float().double())
    assert torch.equal(layout.read(), vector)
    assert all(p.requires_grad == (name != "frozen") for name, p in target.named_parameters())


@cuts
def test_join_is_the_inverse_of_split(fragments: int, pattern: str) -> None:
    layout = Layout(MixedParameters(), fragments=fragments, pattern=pattern)
    vector = layout.read()
    views = layout.split(vector)
    assert torch.equal(layout.join({name: view.clone() for name, view in views.items()}), vector)
    views["scalar"].fill_(9.0)
    assert (vector == 9.0).sum() == 1, "split shares the vector's memory"
    with pytest.raises(ValueError, match="expected the model's own tensors"):
        layout.join({name: view for name, view in views.items() if name != "nothing"})


@pytest.mark.parametrize("name", list(CODEC_SHAPES))
def test_an_encoded_pseudo_gradient_updates_the_model(name: str) -> None:
    """base - local, encoded, decoded and subtracted from base: as close as the codec's error."""
    base, local = MixedParameters(seed=1), MixedParameters(seed=2)
    layout = Layout(local, fragments=3)
    start = Layout(base, fragments=3).read()
    codec = get_codec(name, topk=layout.numel)
    for fragment in range(3):
        span = layout.span(fragment)
        gradient = layout.progress(start[span.start : span.stop], fragment).neg_()
        decoded = codec.decode(codec.encode(gradient), span.numel)
        Layout(base, fragments=3).write(start[span.start : span.stop] - decoded, fragment)
    assert base.head.weight is base.embedding.weight
    tolerance = 0.0 if name == "fp32" else 0.05 if name != "e3m0" else 2.0
    for key, parameter in parameters(base).items():
        if key != "frozen":
            expected = parameters(local)[key]
            assert torch.allclose(parameter, expected, rtol=0.01, atol=tolerance + 1e-6), key


def test_the_rounding_of_a_narrow_parameter_is_not_progress() -> None:
    model = MixedParameters()
    layout = Layout(model)
    weights = layout.read() + 1e-4 * torch.arange(layout.numel)
    layout.write(weights)
    rounded = layout.split(layout.read() - weights)
    assert rounded["brain"].abs().max() > 0 and rounded["half_wide"].abs().max() > 0
    assert torch.equal(layout.progress(weights), torch.zeros(layout.numel))
    with torch.no_grad():
        model.brain += 1.0
    moved = layout.split(layout.progress(weights))
    assert moved["brain"].abs().min() > 0.9
    assert all(not tensor.any() for name, tensor in moved.items() if name != "brain")


@cuts
@pytest.mark.parametrize("add", [False, True])
def test_put_progress_writes_chunk_by_chunk(
    fragments: int, pattern: str, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits equal those of a separate vector, and no temporary is larger than a chunk."""
    monkeypatch.setattr("diloco.model.host_copies.CHUNK", 4)
    layout = Layout(MixedParameters(seed=1), fragments=fragments, pattern=pattern)
    base = Layout(MixedParameters(seed=2), fragments=fragments, pattern=pattern).read()
    for fragment in (None, *range(fragments)):
        span = layout.span(fragment)
        into = torch.randn(span.numel)
        whole = layout.progress(base[span.start : span.stop], fragment)
        expected = whole.add_(into) if add else whole
        with LargestTensor() as largest:
            layout.put_progress(into, base[span.start : span.stop], fragment, add=add)
        assert torch.equal(into, expected)
        # A non-contiguous tensor is read as a whole, but never the fragment.
        assert largest.numel <= max(4, 2 * 3 * 4 * 5)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created, except views."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
            self.numel = max(self.numel, made.numel())
        return made


def test_an_optimizer_step_changes_every_kind_of_parameter() -> None:
    model = MixedParameters()
    layout = Layout(model)
    before = layout.read()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sum(p.double().square().sum() for p in model.parameters() if p.requires_grad).backward()
    optimizer.step()
    progress = layout.split(layout.progress(before))
    assert all(tensor.ne(0).all() for tensor in progress.values())
    assert torch.equal(before, Layout(MixedParameters()).read()), (
        "a vector read once stays as it was"
    )
