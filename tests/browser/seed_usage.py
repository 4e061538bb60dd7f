"""Resource usage, checkpoints and tracebacks for runs of :mod:`tests.browser.seed`."""

from __future__ import annotations

import datetime
import math
from typing import Any

from tests.browser import seed

TRACEBACK = """step 131 failed
Traceback (most recent call last):
  File "/srv/archipelago/diloco/replica.py", line 212, in main
    train(group, workload)
  File "/srv/archipelago/diloco/group.py", line 401, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB"""
EVERY = 8  # steps of a segment


def used(run: Any, *, gpu: bool = True) -> Any:
    """Add series of memory, CPU, GPU and bandwidth. Each replica has different steps."""
    from runs.metrics.blocks import Points
    from runs.metrics.downsampling import add_points
    from runs.metrics.system_series import NEWEST

    for replica in run.replicas.all():
        last = int(replica.step)
        segments = list(range(1 + replica.number % EVERY, last, EVERY))
        rounds = list(range(40, last, 40))
        series = {
            "rss_bytes": (segments, lambda s, n: 2.1e9 + 4e6 * n + 3e8 * (1 - math.exp(-s / 90))),
            "cpu_cores": (segments, lambda s, n: 1.4 + 0.1 * n + 0.3 * math.sin(s / 11)),
            "grad_norm": (range(1, last), lambda s, n: 1.2 + 0.4 * math.sin(s / 5 + n)),
            "step_s": (range(1, last), lambda s, n: 0.16 + 0.02 * n + 0.01 * math.sin(s)),
            "bytes_up": (rounds, lambda s, n: 1_950_000),
            "bytes_down": (rounds, lambda s, n: 5_850_000),
            "up_bytes_per_s": (rounds, lambda s, n: 9e6 + 2e6 * n + 1e6 * math.sin(s)),
            "down_bytes_per_s": (rounds, lambda s, n: 4e7 + 3e6 * n),
        }
        if gpu:
            series |= {
                "gpu_busy": (segments, lambda s, n: min(1.0, 0.8 + 0.04 * n + 0.1 * math.sin(s))),
                "gpu_memory_bytes": (segments, lambda s, n: 5.4e10 + 1e9 * n),
            }
        begun = run.first_step_at.timestamp()
        points = {}
        for name, (steps, of) in series.items():
            points[name] = Points.of(
                step=list(steps),
                round=[s // 40 + 1 for s in steps],
                tokens=[512 * s for s in steps],
                wall_s=[begun + s * 7.5 / 40 for s in steps],
                value=[of(s, replica.number) for s in steps],
            )
        add_points(run, replica, points, key="step")
        newest = {name: p.value[-1] for name, p in points.items() if name in NEWEST and len(p)}
        type(replica).objects.filter(pk=replica.pk).update(**newest)
    return run


SAMPLE_TEXT = """test_count(self):
        self.assertEqual(self.count('<b>a & b</b>'), 2)

    def test_long_name(self):
        with self.assertRaises(TypeError) as cm:
            """
SAMPLE = {
    "round": 20,
    "prompt": "def ",
    "temperature": 0.7,
    "seed": 0,
    "whole": True,
    "text": SAMPLE_TEXT + "self." * 40 + "\n",
}


def checkpoints(
    run: Any, *rounds: int, final: bool = False, sample: dict[str, Any] | None = None
) -> Any:
    """Create checkpoint rows without objects."""
    from runs.models import Checkpoint

    for number in rounds:
        Checkpoint.objects.create(
            run=run,
            round=number,
            key=f"checkpoints/{number:08d}/00000.00001-0123abcd/weights.safetensors",
            size_bytes=2_701_000,
            digest=seed.digest(f"checkpoint {number}"),
            created_at=run.created_at + datetime.timedelta(seconds=8 * number),
        )
    if final:
        Checkpoint.objects.create(
            run=run,
            round=run.committed_rounds,
            final=True,
            key="final/00000.00001-0123abcd/model.safetensors",
            size_bytes=2_701_000,
            digest=seed.digest("final"),
            sample=sample,
            created_at=run.ended_at or run.state_since,
        )
    return run


def add_traceback(run: Any, number: int) -> None:
    """Add a traceback to the log of replica ``number``."""
    from runs.models import LogLine

    replica = run.replicas.get(number=number)
    LogLine.objects.create(
        replica=replica,
        incarnation=replica.incarnation,
        at=run.created_at + datetime.timedelta(seconds=60),
        level="ERROR",
        message=TRACEBACK,
    )
