"""The sample of the final weights: stored once, bounded, and never fatal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.clock import SystemClock
from diloco.generate import main
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import FinalSample, Identity
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import GPT_SIZES, ByteGPTWorkload, GPTSize
from diloco.store.base import LocalStore, StoreError
from diloco.training.final_result import publish_final, read_final
from diloco.training.sample import SAMPLE_BYTES, SAMPLE_S, GoOn, Sampler, publish_sample, sampler_of
from diloco.workloads.byte_gpt import ByteGPTTraining
from diloco.workloads.sharded import RandomWindows

MakeGroup = Callable[..., Any]
ME = Identity(replica=3, incarnation=keys.incarnation(2, "0123abcd"))


class Clock:
    """Each reading of the clock advances it by one second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def wall(self) -> float:
        return 1e9

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits")


def fake_sampler(*texts: bytes) -> Sampler:
    def go_on(prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
        yield from texts

    return Sampler(prompt="once ", go_on=go_on)


def endless(prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
    for count in itertools.count(1):
        yield b"x" * count


def published(store: LocalStore) -> FinalSample:
    key = keys.final_sample(ME.replica, ME.incarnation)
    return FinalSample.from_bytes(store.get(key))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_the_longest_text_is_stored_with_its_parameters(store: LocalStore) -> None:
    publish_sample(store, ME, fake_sampler(b"up", b"upon", b"upon a t"), round=7, clock=Clock())
    assert published(store) == FinalSample(
        round=7, prompt="once ", text="upon a t", temperature=0.7, seed=0, whole=True, wall_s=1e9
    )


def test_half_a_character_is_replaced_and_the_size_is_bounded(store: LocalStore) -> None:
    publish_sample(store, ME, fake_sampler(b"\xff" * 10_000), round=1, clock=Clock())
    assert published(store).text == "\ufffd" * SAMPLE_BYTES
    publish_sample(store, ME, fake_sampler("ä".encode() * 200 + b"\xc3"), round=1, clock=Clock())
    assert published(store).text == "ä" * 200


def test_a_sample_is_truncated_when_its_time_is_over(store: LocalStore) -> None:
    clock = Clock()
    publish_sample(store, ME, Sampler(prompt="", go_on=endless), round=1, clock=clock)
    result = published(store)
    assert not result.whole and 0 < len(result.text) <= SAMPLE_S + 1 < SAMPLE_BYTES
    assert clock.now_s <= SAMPLE_S + 3


def test_a_replica_that_leaves_truncates_its_sample(store: LocalStore) -> None:
    sampler = Sampler(prompt="", go_on=endless)
    publish_sample(store, ME, sampler, round=1, clock=Clock(), gave_up=lambda: True)
    assert (published(store).text, published(store).whole) == ("x", False)


def test_sampling_errors_are_only_logged(
    store: LocalStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
        yield b"so far"
        raise RuntimeError("out of memory")

    def full(key: str, data: bytes) -> None:
        raise StoreError("the disk is full")

    publish_sample(store, ME, Sampler(prompt="", go_on=broken), round=1, clock=Clock())
    publish_sample(store, ME, fake_sampler(), round=1, clock=Clock())
    assert store.list("") == []
    monkeypatch.setattr(store, "put", full)
    publish_sample(store, ME, fake_sampler(b"text"), round=1, clock=Clock())
    assert [record.getMessage() for record in caplog.records] == [
        "no sample of the final weights: RuntimeError: out of memory",
        "no sample of the final weights: ValueError: expected text, found none",
        "no sample of the final weights: StoreError: the disk is full",
    ]


def test_only_the_publisher_draws_a_sample(tiny_group: MakeGroup) -> None:
    group = tiny_group()
    drawn: list[tuple[int, tuple[Any, ...], torch.Tensor]] = []

    def drawing(replica: int) -> GoOn:
        def go_on(prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
            weights = group.members[replica].weights().clone()
            drawn.append((replica, (prompt, n, temperature, seed), weights))
            yield b"text"

        return go_on

    members = [group.start(n, sample=Sampler(prompt="def ", go_on=drawing(n))) for n in range(3)]
    group.wait()
    group.assert_agreed(*members)
    final = read_final(group.store)
    [(replica, arguments, weights)] = drawn
    assert final is not None and replica == final.writer.replica
    assert arguments == (b"def ", SAMPLE_BYTES, 0.7, 0)
    assert torch.equal(weights, members[0].weights()), "of the final weights"
    [info] = [i for i in group.store.list("final/") if i.key.endswith("sample.json")]
    assert info.key == keys.final_sample(final.writer.replica, final.writer.incarnation)
    assert FinalSample.from_bytes(group.store.get(info.key)).round == final.round == 4


def test_a_failed_sample_does_not_fail_the_run(tiny_group: MakeGroup) -> None:
    def broken(prompt: bytes, n: int, *, temperature: float, seed: int) -> Iterator[bytes]:
        raise RuntimeError("no")

    group = tiny_group(total_rounds=1, num_replicas=2)
    members = [group.start(n, sample=Sampler(prompt="", go_on=broken)) for n in range(2)]
    group.wait()
    group.assert_agreed(*members)
    assert read_final(group.store) is not None
    assert not [i for i in group.store.list("final/") if i.key.endswith("sample.json")]


def test_the_generate_command_repeats_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m diloco.generate`` has the defaults of the sample."""
    monkeypatch.setattr("diloco.training.sample.SAMPLE_S", 600.0)  # also on a busy machine
    monkeypatch.setitem(GPT_SIZES, "tiny", GPTSize(layers=1, width=32, heads=2, context=32))
    workload = ByteGPTWorkload(size="tiny")
    store = LocalStore(tmp_path / "run")
    document = GroupDocument(
        run_id="r", name="n", settings=GroupSettings(), workload=workload.to_dict()
    )
    store.create(keys.GROUP, document.to_bytes())
    nothing = RandomWindows(np.zeros(0, np.uint8), GroupSettings(), replica=0, context=32)
    training = ByteGPTTraining(
        workload,
        GroupSettings(),
        nothing,
        np.zeros((0, 33), np.uint8),
        device=torch.device("cpu"),
    )
    model = training.build_model()
    publish_final(
        store,
        ME,
        round=7,
        reason="completed",
        tensors=model.state_dict(),
        weights_digest="",
        config=training.config(),
        summary={},
        wall_s=0.0,
    )
    sampler = sampler_of(training, model)
    assert sampler is not None
    publish_sample(store, ME, sampler, round=7, clock=SystemClock())
    result = published(store)
    assert result.whole and result.prompt == "def "
    assert main([store.uri]) == 0
    assert capsys.readouterr().out == f"{result.prompt}{result.text}\n"


def test_workloads_without_go_on_have_no_sampler() -> None:
    assert sampler_of(object(), nn.Linear(1, 1)) is None
