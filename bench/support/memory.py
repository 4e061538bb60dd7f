"""The resident set of this process, from Linux's ``/proc``, and a model with AdamW's moments."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def resident(name: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"expected {name} in /proc/self/status, found none")


def reset_peak() -> int:
    """Begin a new peak; return the resident set, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def trained_model(numel: int, tensors: int) -> tuple[nn.ParameterList, torch.optim.AdamW]:
    """Return a model of ``numel`` parameters and its optimizer with moments."""
    model = nn.ParameterList(torch.ones(numel // tensors) for _ in range(tensors))
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
