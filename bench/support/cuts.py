"""Small blocks and parts, so that small fragments have many of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def small_cuts(*, block: int = 4096, part_bytes: int = 65_536) -> Iterator[None]:
    """Blocks of ``block`` elements and parts of ``part_bytes``, wherever they are used."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("diloco.protocol.blocks.SMALLEST_BLOCK", block))
        for module in ("model.outer_optimizer", "exchange.mean_reader"):
            stack.enter_context(mock.patch(f"diloco.{module}.DIGEST_CHUNK", block))
        for module in (
            "protocol.blocks",
            "store.s3",
            "protocol.reduce_cost",
            "exchange.payload",
            "exchange.low_bit_mean",
        ):
            stack.enter_context(mock.patch(f"diloco.{module}.PART_BYTES", part_bytes))
        yield
