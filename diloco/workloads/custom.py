"""The ``custom`` workload: model, data and loss from a function of the user.

The function is called with keyword arguments, once in each process of a replica::

    def build(*, seed, replica, device, total_steps, settings, arguments): ...

``seed``
    seed of the group; the initial weights must depend on nothing else.
``replica``
    number of this replica, from 0 to ``settings.max_replicas`` - 1; also its data shard.
``device``
    the :class:`torch.device` of the model and the batches.
``total_steps``
    inner steps of the whole run, for a learning rate schedule.
``settings``
    the :class:`~diloco.protocol.settings.GroupSettings`: batch size, learning rate and others.
``arguments``
    the ``arguments`` of the workload document.

It returns a :class:`~diloco.workloads.base.Workload`; ``sample`` and ``buffers`` are optional. The
types of all return values are checked, because a wrong type would cause an error much later, or
none; the error names the function. Exceptions of user code propagate unchanged.

The module of the function must be importable. The launcher puts code archives on the path and
installs requirements.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import CustomWorkload
from diloco.workloads.base import HeldOutLoss, Optimizers, Workload

METHODS = (
    "build_model",
    "inner_optimizer",
    "lr_at",
    "train_batch",
    "loss",
    "tokens",
    "evaluate",
    "config",
)


def load_training(
    workload: CustomWorkload, settings: GroupSettings, *, replica: int, device: torch.device
) -> CustomTraining:
    """Call the function of the workload. Raises :class:`SettingsError` if it does not exist, does
    not take these arguments or returns no workload."""
    name = workload.function
    given = {
        "seed": settings.seed,
        "replica": replica,
        "device": device,
        "total_steps": settings.total_steps,
        "settings": settings,
        "arguments": dict(workload.arguments),
    }
    build = _function(name)
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise _wrong(name, f"a function that takes {', '.join(given)}", str(error)) from None
    except ValueError:
        pass  # no signature available; the call below shows whether it fits
    try:
        workload_object = build(**given)
    except Exception as error:
        error.add_note(f"in {name}, the function of the workload")
        raise
    missing = [method for method in METHODS if not callable(getattr(workload_object, method, None))]
    if missing:
        found = f"{_type(workload_object)} without {', '.join(missing)}"
        raise _wrong(name, f"a workload with methods {', '.join(METHODS)}", found)
    return CustomTraining(name, workload_object)


def _function(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise _wrong(name, f"a module {module_name} on the path", f"no {missing}") from None
        raise _wrong(
            name, f"{missing}, which {module_name} imports (is it in 'requirements'?)", "none"
        ) from None
    except Exception as error:
        error.add_note(f"on importing {module_name}, the module of the workload's function")
        raise
    function = getattr(module, attribute, None)
    if not callable(function):
        where = f"{module_name} ({getattr(module, '__file__', None) or 'no file'})"
        found = "none" if function is None else _type(function)
        raise _wrong(name, f"a function {attribute} in {where}", found)
    return function  # type: ignore[no-any-return]


class CustomTraining:
    """A :class:`~diloco.workloads.base.Workload` that checks the return values of another one."""

    def __init__(self, name: str, workload: Workload) -> None:
        self._name = name
        self._workload = workload
        self.buffers = getattr(workload, "buffers", None)

    def build_model(self) -> nn.Module:
        model = self._workload.build_model()
        self._expect("build_model", "a torch.nn.Module", model, isinstance(model, nn.Module))
        return model

    def inner_optimizer(self, model: nn.Module) -> Optimizers:
        made = self._workload.inner_optimizer(model)
        parts = made if isinstance(made, Sequence) and made else [made]
        is_right = all(isinstance(part, torch.optim.Optimizer) for part in parts)
        expected = "a torch.optim.Optimizer, or a sequence of them"
        self._expect("inner_optimizer", expected, made, is_right)
        return made

    def lr_at(self, step: int) -> float:
        lr = self._workload.lr_at(step)
        self._expect("lr_at", "a number of 0 or more", lr, _is_number(lr) and lr >= 0)
        return float(lr)

    def train_batch(self, step: int) -> Any:
        return self._workload.train_batch(step)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self._workload.loss(model, batch)
        is_one = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        self._expect("loss", "a tensor of one element, with a graph", loss, is_one)
        return loss.reshape(())

    def tokens(self, batch: Any) -> int:
        tokens = self._workload.tokens(batch)
        is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
        self._expect("tokens", "a count", tokens, is_count)
        return tokens

    def evaluate(self, model: nn.Module) -> HeldOutLoss:
        result = self._workload.evaluate(model)
        is_pair = isinstance(result, tuple) and len(result) == 2
        is_right = is_pair and _is_number(result[0], finite=False) and isinstance(result[1], int)
        self._expect("evaluate", "(mean loss, tokens), a float and an int", result, is_right)
        return HeldOutLoss(float(result[0]), result[1])

    def config(self) -> Mapping[str, Any]:
        config = self._workload.config()
        try:
            json.dumps(config)
            is_one = isinstance(config, Mapping)
        except (TypeError, ValueError):
            is_one = False
        self._expect("config", "a JSON-serialisable mapping", config, is_one)
        return config

    def _expect(self, method: str, what: str, found: object, is_right: bool) -> None:
        if not is_right:
            raise _wrong(self._name, f"{method}() to return {what}", _described(found))


def _wrong(name: str, expected: str, found: str) -> SettingsError:
    return SettingsError("workload", f"{name}: expected {expected}, found {found}")


def _is_number(value: object, *, finite: bool = True) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) or not finite


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        graph = "with" if value.requires_grad else "without"
        return f"a tensor of shape {tuple(value.shape)} {graph} a graph"
    return f"{_type(value)} {value!r}"[:200]
