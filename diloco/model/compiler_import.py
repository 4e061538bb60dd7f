"""Optimizers that do not import ``torch._dynamo`` in a process which compiles nothing.

In PyTorch 2, the first ``Optimizer.add_param_group`` and ``step`` import the compiler, only
to exclude themselves from compiled graphs. The import takes as long as that of ``torch`` itself,
about 1.6 s of CPU, which is almost half the time that a small replica needs to start. While the
module is not imported, no function is being compiled, so there is nothing to exclude.

This relies on private names of PyTorch (``torch/_compile.py``, ``torch/optim/optimizer.py``). Where
they differ, the function in question keeps importing the compiler, and nothing else changes.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_IN_OPTIMIZER = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def defer_compiler_import() -> None:
    """Let the optimizers of ``torch.optim`` import the compiler only when this process uses it.

    Call it at the start of a process, before it creates an optimizer. Calls after the first change
    nothing.
    """
    base = torch.optim.Optimizer
    for name in _IN_OPTIMIZER:
        function = getattr(getattr(base, name), "__wrapped__", None)
        if function is not None and not hasattr(function, "__dynamo_disable"):
            function.__dynamo_disable = _until_imported(function)
    for optimizer in vars(torch.optim).values():
        if isinstance(optimizer, type) and issubclass(optimizer, base):
            step = vars(optimizer).get("step")
            if getattr(step, "__code__", None) is _STEP_CODE:
                optimizer.step = _step(step)  # type: ignore[method-assign]


def _until_imported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``torch._disable_dynamo`` calls in place of a decorated function."""

    def call(*arguments: Any, **named: Any) -> Any:
        if _COMPILER in sys.modules:
            import torch._dynamo as compiler

            function.__dynamo_disable = compiler.disable(function, wrapping=False)  # type: ignore
            return function.__dynamo_disable(*arguments, **named)  # type: ignore[attr-defined]
        return function(*arguments, **named)

    return call


def _step(original: Any) -> Any:
    """Return a ``step`` that does what ``original`` does, without the import."""
    inner = original.__wrapped__

    @functools.wraps(inner)
    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        if _COMPILER in sys.modules:
            return original(self, *arguments, **named)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inner(self, *arguments, **named)

    return step


def _code_of_step() -> Any:
    module = importlib.import_module("torch.optim.optimizer")
    decorate = getattr(module, "_use_grad_for_differentiable", None)
    return None if decorate is None else decorate(lambda self: None).__code__


_STEP_CODE = _code_of_step()
