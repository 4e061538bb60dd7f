"""Hardware of this machine: a CPU replica, or one with a GPU."""

from __future__ import annotations

from executors.catalogue import Hardware, Table

TABLE = Table(
    backend="local",
    hardware=(
        Hardware(backend="local", name="cpu", label="CPU of this machine", price_usd_h=0.0),
        Hardware(
            backend="local",
            name="gpu",
            label="One GPU of this machine",
            gpu="any",
            gpus=1,
            price_usd_h=0.0,
        ),
    ),
)
