"""Cleans up the process group and the environment after torchft's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def own_process_group() -> Iterator[None]:
    """torchft's trainers create a default process group and set the variables of torchrun."""
    with patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
