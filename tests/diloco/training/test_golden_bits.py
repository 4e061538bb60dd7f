"""I3: whole runs end with fixed bits, by every plan and codec, on any CPU, with any threads.

The digests were written down once; a change of code that is to change nothing must not change
them. What is *meant* to change the numbers says so and writes down new ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = {
    "fp32": "91d7a29dae0fb620408b7231454b7bf67076a082742bd0dff9085accfbdbb3f3",
    "bf16": "20ea6b8256876bf5408c5fb053d6cbe4f2a6f5c04044f6fcbf829b2c861c6280",
    "int8": "4686bc0cfaaf1d7c6696a02a56dc5429d875e7d279c81875ad54607e9736500c",
    "e3m0": "f3d79b2682b4e81643b7e90a2f76f90f469bc5a222c19cb8c014b93f190b2a6e",
    "topk": "f3f7e9417cbb0b3c9034bb69d104fa1e5c16a36ec7df4647917ae44f20bd04f2",
    "rda": "8e2f6dac7920b22111f82ed50d44bc8c8f79496546c848fda841ffc00b326e3d",
    "fragments": "624c3a543bdc6a15351b0689a641aad1781460a6ac95ad7ba36e3bcb11cad07d",
    "overlap": "79d07554e5c5d32c8c4a0ab03529e280e76d1400e3f0bf45d56180c0c35b7878",
    "open": "de8e0cf3bdb0179e633cc164f0aaf53a47408debdde58ccb09d47916fcc28fcb",
}
ROOT = Path(__file__).parents[3]
PLANNED = ("fp32", "bf16", "int8", "e3m0", "topk", "rda")
NAMES = [
    *(f"{name}-{plan}" for name in PLANNED for plan in ("gather", "sharded", "syncer")),
    *("fragments", "overlap", "open"),
]
EVEN, ODD = NAMES[::2], NAMES[1::2]


@pytest.mark.parametrize(
    ("capability", "threads", "names"),
    [("default", 1, EVEN), ("default", 2, ODD), ("avx2", 1, ODD), ("avx2", 2, EVEN)],
    ids=["default-1", "default-2", "avx2-1", "avx2-2"],
)
def test_every_run_ends_with_the_bits_written_down(
    tmp_path: Path, capability: str, threads: int, names: list[str]
) -> None:
    """Each variant under both capabilities and both numbers of threads."""
    program = Path(__file__).with_name("golden_program.py")
    found = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(threads), *names],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    digests = dict(line.split() for line in found.stdout.splitlines())
    assert digests == {name: GOLDEN[name.rsplit("-", 1)[0]] for name in names}
