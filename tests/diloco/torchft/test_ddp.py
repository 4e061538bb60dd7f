"""Data parallel wrappers: gradients are the group's mean when ``backward`` returns."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from diloco.ddp import DistributedDataParallel, GradBucket, PureDistributedDataParallel

WRAPPERS = [DistributedDataParallel, PureDistributedDataParallel]


class Lazy:
    """A work that does nothing until it is awaited, like torchft's."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class Harness:
    """Averages over threads: call n of every member matches call n of the others."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.barrier = threading.Barrier(members, timeout=600)
        self.calls: dict[int, list[torch.Tensor]] = {}
        self.lock = threading.Lock()

    def manager(self) -> Member:
        return Member(self)


class Member:
    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.shapes: list[tuple[int, ...]] = []
        self.waited = 0

    def allreduce(self, tensor: torch.Tensor) -> Lazy:
        number = len(self.shapes)
        self.shapes.append(tuple(tensor.shape))
        with self.harness.lock:
            self.harness.calls.setdefault(number, []).append(tensor)

        def finish() -> None:
            self.waited += 1
            self.harness.barrier.wait()
            mean = torch.stack([t.double() for t in self.harness.calls[number]]).mean(0)
            self.harness.barrier.wait()
            tensor.copy_(mean)

        return Lazy(finish)


class Net(nn.Module):
    """Two inputs' worth of layers, of which ``use_second`` picks whether the second is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4)
        self.rounded = nn.Linear(4, 1).bfloat16()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor, *, use_second: bool = True) -> torch.Tensor:
        hidden = self.first(x) + (self.second(x) if use_second else 0.0)
        result: torch.Tensor = self.rounded(hidden.bfloat16()).float().sum()
        return result


def double(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def batch(member: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(member))


def together(members: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(member: int) -> None:
        try:
            work(member)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(m,), daemon=True) for m in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]


def expected_gradients(shared: nn.Module, members: int) -> dict[str, torch.Tensor]:
    """The mean of the gradients of each member."""
    totals: dict[str, torch.Tensor] = {}
    for member in range(members):
        model = copy.deepcopy(shared)
        model(batch(member)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                totals[name] = totals.get(name, torch.zeros(())) + parameter.grad.double()
    return {name: total / members for name, total in totals.items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_the_mean_when_backward_returns(wrapper: type[nn.Module]) -> None:
    shared, harness = Net(), Harness(3)
    expected = expected_gradients(shared, 3)
    managers = [harness.manager() for _ in range(3)]

    def train(member: int) -> None:
        model = wrapper(managers[member], copy.deepcopy(shared))
        model(batch(member)).backward()
        for name, parameter in model.module.named_parameters():
            if name in expected:
                torch.testing.assert_close(
                    parameter.grad.double(), expected[name], rtol=1e-2, atol=1e-2
                )
        assert managers[member].waited == len(managers[member].shapes) > 0

    together(3, train)
    assert managers[0].shapes == managers[1].shapes == managers[2].shapes


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_sync_accumulates_and_the_next_backward_reduces_the_sum(
    wrapper: type[nn.Module],
) -> None:
    shared, harness = nn.Linear(3, 1, bias=False), Harness(2)
    totals = [batch(m).sum(0) + batch(m + 10).sum(0) for m in range(2)]

    def train(member: int) -> None:
        manager = harness.manager()
        model = wrapper(manager, copy.deepcopy(shared))
        with model.no_sync():
            model(batch(member)).sum().backward()
        assert not manager.shapes
        model(batch(member + 10)).sum().backward()
        torch.testing.assert_close(model.module.weight.grad[0], sum(totals) / 2)

    together(2, train)


def test_a_parameter_used_by_another_replica_gets_a_gradient() -> None:
    shared, harness = Net(), Harness(2)

    def train(member: int) -> None:
        model = DistributedDataParallel(harness.manager(), copy.deepcopy(shared))
        model(batch(member), use_second=member == 0).backward()
        gradient = model.module.second.weight.grad
        assert gradient is not None and bool(gradient.any())

    together(2, train)


def test_an_unused_parameter_has_no_gradient() -> None:
    model = DistributedDataParallel(Harness(1).manager(), Net())
    model(batch(0), use_second=False).backward()
    assert model.module.second.weight.grad is None


def test_buckets_start_in_a_fixed_order() -> None:
    harness = Harness(1)
    manager = harness.manager()
    module = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 2), "c": nn.Linear(3, 3)})
    wrapped = DistributedDataParallel(manager, module, bucket_cap_mb=1e-6)
    assert len(wrapped.buckets) == 6
    for order in ("abc", "cba"):
        x = batch(0)
        loss = torch.stack([module[name](x).sum() * n for n, name in enumerate(order, 1)]).sum()
        loss.backward()
    half = len(manager.shapes) // 2
    assert manager.shapes[:half] == manager.shapes[half:]
    assert manager.shapes[0] == (3,), "the last layer's bias: the backward pass comes by it first"


def test_a_communication_hook_replaces_the_manager() -> None:
    manager = Harness(1).manager()
    model = DistributedDataParallel(manager, nn.Linear(3, 1, bias=False))
    seen: list[int] = []

    def doubled(state: str, bucket: GradBucket) -> Lazy:
        seen.append(bucket.index)
        assert state == "state"
        return Lazy(lambda: double(bucket.buffer))

    model.register_comm_hook("state", doubled)
    model(batch(0)).sum().backward()
    torch.testing.assert_close(model.module.weight.grad[0], 2 * batch(0).sum(0))
    assert seen == [0] and not manager.shapes


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_module_without_trainable_parameters_is_refused(wrapper: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="expected a module with trainable parameters"):
        wrapper(Harness(1).manager(), nn.ReLU())
