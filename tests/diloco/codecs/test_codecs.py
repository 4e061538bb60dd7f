"""Codecs: golden bytes, error bounds, slices, and equal bits on every CPU."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codecs import ALIGNMENT, get_codec
from diloco.codecs.blocks import SCALE_BYTES, put_scale
from diloco.protocol.payload_size import CODEC_SHAPES, payload_bytes, reduced_codec
from tests import torch_process

NAMES = tuple(CODEC_SHAPES)
SCALED = ("int8", "e3m0", "topk")
LARGEST = torch.finfo(torch.float32).max
# A tail of one value, odd lengths, and both sides of every chunk boundary.
SIZES = (0, 1, 2, 3, 255, 256, 257, 4095, 4096, 4097, 5001)

vectors = st.lists(
    st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32), min_size=1, max_size=600
).map(torch.tensor)
seeds = st.integers(0, 2**32 - 1)


def normal(numel: int, *, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def round_trip(name: str, vector: Tensor) -> Tensor:
    codec = get_codec(name)
    return codec.decode(codec.encode(vector), vector.numel())


def hex_of(body: Tensor) -> str:
    return bytes(body.tolist()).hex(" ")


# -- the format, byte by byte ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "body"),
    [
        ("fp32", [1.0, -2.5], "00 00 80 3f 00 00 20 c0"),
        ("bf16", [1.0, -2.5], "80 3f 20 c0"),
        # Scale 1, then the values; 0.5 and 1.5 round to even.
        ("int8", [127.0, -127.0, 0.5, 1.5, -1.0, 0.0], "00 00 80 3f 7f 81 00 02 ff 00"),
        # Scale 4: 4 is code 7, -2 is -6, 0 is 0, 1 is 5; the odd fifth value is padded with zero.
        ("e3m0", [4.0, -2.0, 0.0, 1.0, -4.0], "00 00 80 40 e7 50 0f"),
        # Scale 2, indices 1 and 3, values 127 and -64.
        ("topk", [0.0, 254.0, 1.0, -128.0, 2.0], "00 00 00 40 01 00 03 00 7f c0"),
    ],
)
def test_golden_bytes_of_a_short_vector(name: str, values: list[float], body: str) -> None:
    codec = get_codec(name, topk=2)
    assert hex_of(codec.encode(torch.tensor(values))) == body


def test_levels_and_thresholds_of_the_e3m0_codes() -> None:
    levels = [2.0**-exponent for exponent in range(7)]
    exact = torch.tensor([*levels, *(-level for level in levels), 0.0])
    assert torch.equal(round_trip("e3m0", exact), exact)

    def rounded(value: float) -> float:
        return float(round_trip("e3m0", torch.tensor([1.0, value]))[1])

    for level in levels[1:]:
        assert rounded(level * 1.453125) == 2 * level
        assert rounded(-level * 1.4531) == -level
    assert rounded(2.0**-7) == 2.0**-6
    assert rounded(2.0**-7 * 0.9999) == 0.0
    assert rounded(2.0**-6 * 0.9999) == 2.0**-6


def test_a_scale_precedes_the_values_of_each_block() -> None:
    vector = torch.cat([torch.full((256,), 127.0), torch.full((3,), 254.0)])
    body = get_codec("int8").encode(vector)
    assert hex_of(body[:5]) == "00 00 80 3f 7f"
    assert hex_of(body[260:]) == "00 00 00 40 7f 7f 7f"


def test_top_k_keeps_the_largest_and_of_equal_values_the_first() -> None:
    vector = torch.zeros(ALIGNMENT + 3)
    vector[[4000, 17, 300]] = torch.tensor([3.0, -3.0, 3.0])
    vector[ALIGNMENT + 2] = -1e-3
    codec = get_codec("topk", topk=2)
    decoded = codec.decode(codec.encode(vector), vector.numel())
    assert decoded.nonzero().flatten().tolist() == [17, 300, ALIGNMENT + 2]
    assert decoded[[17, 300]].tolist() == [-3.0, 3.0]
    assert decoded[-1].item() == pytest.approx(-1e-3, rel=1e-6)


# -- properties of all codecs ------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", SIZES)
def test_any_length_round_trips_with_the_computed_size(name: str, numel: int) -> None:
    codec = get_codec(name)
    vector = normal(numel, seed=numel)
    before = vector.clone()
    body = codec.encode(vector)
    decoded = codec.decode(body, numel)
    assert body.dtype == torch.uint8 and body.shape == (codec.encoded_bytes(numel),)
    assert codec.encoded_bytes(numel) == payload_bytes(numel, name)
    assert decoded.dtype == torch.float32 and decoded.shape == (numel,)
    assert torch.equal(vector, before)


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds, cuts=st.tuples(st.integers(0, 4), st.integers(0, 4)), tail=st.integers(0, 5000))
@settings(max_examples=25, deadline=None)
def test_aligned_slices_are_encoded_separately(
    name: str, seed: int, cuts: tuple[int, int], tail: int
) -> None:
    codec = get_codec(name, topk=7)
    vector = normal(4 * ALIGNMENT + tail, seed=seed)
    body = codec.encode(vector)
    start, stop = (cut * ALIGNMENT for cut in sorted(cuts))
    cut = slice(codec.encoded_bytes(start), codec.encoded_bytes(stop))
    assert torch.equal(codec.encode(vector[start:stop]), body[cut])
    assert torch.equal(
        codec.decode(body[cut], stop - start), codec.decode(body, vector.numel())[start:stop]
    )
    rest = body[codec.encoded_bytes(stop) :]
    assert torch.equal(codec.encode(vector[stop:]), rest)
    assert torch.equal(
        codec.decode(rest, vector.numel() - stop), codec.decode(body, vector.numel())[stop:]
    )


@pytest.mark.parametrize("name", NAMES)
def test_vectors_longer_than_one_step_have_no_seams(name: str) -> None:
    from diloco.codecs import base

    numel = base.CPU_STEP + 2 * ALIGNMENT + 11
    vector = normal(numel)
    codec = get_codec(name)
    pieces = [codec.encode(piece) for piece in vector.split(ALIGNMENT)]
    assert torch.equal(codec.encode(vector), torch.cat(pieces))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "view",
    [
        lambda v: v[::2],
        lambda v: v.view(-1, 2)[:, 1],
        lambda v: v.requires_grad_(),
        lambda v: v[3:],
    ],
    ids=["every second", "a column", "with gradient", "not at the start"],
)
def test_any_1d_view_is_encoded_like_its_copy(name: str, view: Callable[[Tensor], Tensor]) -> None:
    vector = view(normal(9000))
    codec = get_codec(name)
    body = codec.encode(vector)
    assert torch.equal(body, codec.encode(vector.detach().clone()))
    assert not codec.decode(body, vector.numel()).requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_body_can_start_at_any_byte(name: str, offset: int) -> None:
    codec = get_codec(name, topk=3)
    vector = normal(4100)
    body = codec.encode(vector)
    shifted = torch.zeros(body.numel() + offset, dtype=torch.uint8)
    shifted[offset:] = body
    assert torch.equal(codec.decode(shifted[offset:], 4100), codec.decode(body, 4100))


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_bodies_and_vectors_are_written_into_given_memory(name: str, offset: int) -> None:
    codec, vector = get_codec(name), normal(5001)
    body = codec.encode(vector)
    memory = torch.full((offset + body.numel() + 3,), 7, dtype=torch.uint8)
    out = memory[offset : offset + body.numel()]
    assert codec.encode(vector, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, body)
    assert memory[:offset].tolist() + memory[-3:].tolist() == [7] * (offset + 3)

    room = torch.full((5003,), 7.0)
    decoded = codec.decode(out, 5001, room[1:-1])
    assert torch.equal(room[1:-1], codec.decode(body, 5001)) and torch.equal(decoded, room[1:-1])
    assert room[[0, -1]].tolist() == [7.0, 7.0]
    with pytest.raises(ValueError, match="expected a body of"):
        codec.encode(vector, memory)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    vector = torch.zeros(5000)
    vector[4500] = 1.0  # in another block and chunk
    decoded = round_trip(name, vector)
    assert decoded.nonzero().flatten().tolist() == [4500]
    assert decoded[4500].item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_decode_to_non_finite_values(name: str, value: float) -> None:
    vector = normal(9000)
    vector[4999] = value
    decoded = round_trip(name, vector)
    assert not torch.isfinite(decoded[ALIGNMENT : 2 * ALIGNMENT]).all()
    assert torch.isfinite(decoded[:ALIGNMENT]).all(), "other chunks are not touched"
    codec = get_codec(name)
    assert torch.equal(codec.encode(vector), codec.encode(vector)), "and it is deterministic"


@pytest.mark.parametrize("name", ["int8", "e3m0"])
def test_a_non_finite_block_has_the_scale_nan_and_zeros(name: str) -> None:
    body = get_codec(name).encode(torch.tensor([torch.nan, 1.0, torch.inf, -torch.inf]))
    assert body[:4].view(torch.float32).isnan().all()
    assert (body[4:] == 0).all()


@pytest.mark.parametrize("name", SCALED)
def test_huge_values_stay_finite_and_subnormal_ones_become_zero(name: str) -> None:
    huge = torch.tensor([LARGEST, -LARGEST, 0.0, LARGEST / 2])
    assert round_trip(name, huge).tolist() == pytest.approx(huge.tolist(), rel=0.02)
    tiny = torch.tensor([1e-45, -1e-40, 2.0**-101])
    assert round_trip(name, tiny).tolist() == [0.0, 0.0, 0.0]
    smallest = torch.tensor([2.0**-100, -(2.0**-100), 0.0])
    assert round_trip(name, smallest).tolist() == pytest.approx(smallest.tolist(), rel=1e-6, abs=0)


# -- errors ------------------------------------------------------------------------------------


def blocks(vector: Tensor, size: int) -> list[Tensor]:
    return list(torch.split(vector, size))


@given(vector=vectors)
@settings(max_examples=60, deadline=None)
def test_the_int8_error_is_at_most_half_a_step(vector: Tensor) -> None:
    decoded = round_trip("int8", vector)
    for old, new in zip(blocks(vector, 256), blocks(decoded, 256), strict=True):
        bound = old.abs().max().double() / 254 * (1 + 1e-5) + 2.0**-100
        assert (new.double() - old.double()).abs().max() <= bound


@given(vector=vectors)
@settings(max_examples=60, deadline=None)
def test_the_e3m0_error_is_bounded_by_its_thresholds(vector: Tensor) -> None:
    decoded = round_trip("e3m0", vector)
    for old, new in zip(blocks(vector, 256), blocks(decoded, 256), strict=True):
        largest = old.abs().max().double()
        relative = (2 - 1.453125) / 1.453125
        bound = (old.abs().double() * relative).clamp(min=largest * 2**-7) * (1 + 1e-5)
        assert ((new.double() - old.double()).abs() <= bound + 2.0**-100).all()
        assert (new * old >= 0).all(), "no sign is turned"


@given(vector=vectors, topk=st.integers(1, 80))
@settings(max_examples=60, deadline=None)
def test_top_k_drops_nothing_larger_than_what_it_keeps(vector: Tensor, topk: int) -> None:
    codec = get_codec("topk", topk=topk)
    body = codec.encode(vector)
    decoded = codec.decode(body, vector.numel())
    kept = min(topk, vector.numel())
    indices = body[4 : 4 + 2 * kept].clone().view(torch.int16).long()
    assert (indices[1:] > indices[:-1]).all()
    dropped = torch.ones(vector.numel(), dtype=torch.bool)
    dropped[indices] = False
    assert (decoded[dropped] == 0).all()
    if dropped.any():
        assert vector[dropped].abs().max() <= vector[indices].abs().min()
    bound = vector.abs().max().double() / 254 * (1 + 1e-5) + 2.0**-100
    assert (decoded[indices].double() - vector[indices].double()).abs().max() <= bound


def test_e3m0_is_unbiased_on_normal_data() -> None:
    vector = normal(2**20)
    decoded = round_trip("e3m0", vector)
    assert float(decoded.dot(vector) / vector.dot(vector)) == pytest.approx(1, abs=0.006)
    assert float((decoded - vector).norm() / vector.norm()) == pytest.approx(0.197, abs=0.002)


def test_error_feedback_preserves_the_sum_with_top_k() -> None:
    """u = g + r; r = u - decode(encode(u)): omitted values are sent later, so that after n rounds
    the sent sum is the true sum less one residual, which does not grow with n."""
    codec = get_codec("topk", topk=256)
    numel, rounds, decay = ALIGNMENT + 100, 100, 1.0
    mean = normal(numel, seed=1)
    residual = torch.zeros(numel)
    meant, sent, forgetful = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    errors = []
    for round in range(rounds):
        gradient = mean + 0.3 * normal(numel, seed=2 + round)
        update = gradient + decay * residual
        decoded = codec.decode(codec.encode(update), numel)
        residual = update - decoded
        meant += gradient
        sent += decoded
        forgetful += codec.decode(codec.encode(gradient), numel)
        errors.append(float((sent - meant).norm() / meant.norm()))
    assert torch.allclose(meant, sent + residual, atol=1e-3)
    assert errors[0] > 0.7 and errors[-1] < 0.12 and errors[-1] < errors[49] < errors[9]
    assert float((forgetful - meant).norm() / meant.norm()) > 0.5, "without, most never arrives"


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_body_of_another_size_is_refused(name: str) -> None:
    codec = get_codec(name)
    body = codec.encode(normal(4100))
    with pytest.raises(ValueError, match=f"expected a body of {codec.encoded_bytes(4103)} bytes"):
        codec.decode(body, 4103)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vector", [torch.zeros(3, dtype=torch.float64), torch.zeros(2, 2)])
def test_only_1d_fp32_is_encoded(name: str, vector: Tensor) -> None:
    with pytest.raises(ValueError, match="expected a 1-d float32 vector"):
        get_codec(name).encode(vector)


@pytest.mark.parametrize("indices", [(3, 3), (3, 2), (0, 10), (-1, 3)])
def test_foreign_top_k_indices_are_refused(indices: tuple[int, int]) -> None:
    codec = get_codec("topk", topk=2)
    body = codec.encode(normal(10))
    body[4:8] = torch.tensor(indices, dtype=torch.int16).view(torch.uint8)
    with pytest.raises(ValueError, match="expected ascending indices below 10"):
        codec.decode(body, 10)


@pytest.mark.parametrize("topk", [0, ALIGNMENT + 1])
def test_top_k_out_of_range_is_refused(topk: int) -> None:
    with pytest.raises(ValueError, match=f"expected topk from 1 to 4096, found {topk}"):
        get_codec("topk", topk=topk)


def test_the_error_names_an_unknown_codec() -> None:
    with pytest.raises(ValueError, match=r"expected a codec of fp32, .*, found 'zip'"):
        get_codec("zip")


def test_means_of_lossy_payloads_use_fp32() -> None:
    assert {name: reduced_codec(name) for name in NAMES} == {
        "fp32": "fp32",
        "bf16": "bf16",
        "int8": "fp32",
        "e3m0": "fp32",
        "topk": "fp32",
    }
    assert {reduced_codec(name, "e3m0") for name in NAMES} == {"e3m0"}


# -- equal bits on every CPU -------------------------------------------------------------------


def digests() -> str:
    """One line per codec: the sha256 of an encoded and a decoded vector with edge cases."""
    # Integers, because torch's own random numbers and exponentials differ between CPUs.
    position = torch.arange(300_001)
    vector = (position * 2654435761 % 2**24 - 2**23).float() * 2.0 ** -(position // 7 % 40)
    vector[1000:3000] = 0
    vector[5000:5100] *= 1e-30
    vector[9000:9400] *= 1e30
    lines = []
    for name in NAMES:
        codec = get_codec(name)
        body = codec.encode(vector)
        both = (
            body.numpy().tobytes()
            + codec.decode(body, vector.numel()).nan_to_num(7).numpy().tobytes()
        )
        lines.append(f"{name} {hashlib.sha256(both).hexdigest()}")
    return "\n".join(lines)


@pytest.mark.parametrize(("capability", "threads"), [("default", 2), ("avx2", 1)])
def test_bits_are_independent_of_cpu_and_threads(capability: str, threads: int) -> None:
    program = f"import torch; torch.set_num_threads({threads}); import test_codecs as t; "
    result = torch_process.run(
        ["-c", program + "print(t.digests())"],
        env={
            **os.environ,
            "ATEN_CPU_CAPABILITY": capability,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == digests()


def test_the_scale_nan_is_stored_with_the_bits_of_a_cpu() -> None:
    """A GPU's NaN has others, and a contribution has the same bytes on every device."""
    body = torch.zeros(1, SCALE_BYTES, dtype=torch.uint8)
    put_scale(torch.tensor([[0x7FFFFFFF]], dtype=torch.int32).view(torch.float32), body)
    assert body.view(torch.int32).item() == 0x7FC00000
