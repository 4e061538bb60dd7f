"""I3: runs end with fixed bits, for every plan and codec, CPU capability and number of threads.

The digests are constants. A refactoring must not change them; a commit that is meant to change the
numbers updates them and gives the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.protocol.payload_size import CODEC_SHAPES
from tests import torch_process

GOLDEN = {
    "fp32": "fc680302fa50c1465ca2b864ba849880cb881fb7a7b5d6300d35d736589f64e3",
    "bf16": "739e682ce520952d4766a5bf6a9f3211a152e7a528ad8e13ffbffaeed495808c",
    "int8": "eb42794437d11ac3a06eab23c01d49e0e0ea349ad33d4440ead429beb6701489",
    "e3m0": "fa87079463a061253c09ca50669d91e3a113aa04997ae154262f3aeb526f8ceb",
    "topk": "7aa1700d2cf54e033746ec8cd34de7b55a31c2d1b54cd4976cbd71e921a322bc",
    "rda": "14fb0a1bf5d4cddf18f9d6cf02087ee3417bb8b61fdea3089d09c5e6efaa9364",
    "fragments": "aee344b15becdce4b9d7a03fbd12ceb2d273ab7fc8e2aa44bb5647b32ce65f12",
    "overlap": "39d5849fb086266f41cccc47e63716e661a09e8c096e898fc04876eb1350c1e4",
    "open": "514d0c386e02dbdecd32257acf88067b3d99e5609d6b821e7fc140f04ed160b1",
    "narrow_state": "29896b2a75e4bf53eca39feb3c66e2c4e3c5f1647d07065ff54fd2005324e29f",
    "late": "cde8281415e7aa4441bc9b200450489293facc3d977bcbd55049f4790b7435e5",
    "late_overlap": "53e91dc1c1bc4455959f4a03e0d8cbeccd5499b2099abc16af43e72d33fb5cdb",
    "low_bit": "45c3ab06af83794cea87fa485bac0fbd4342633fb259d3f70f95c0adf148b55b",
    "low_bit_open": "96230333d479ef1baf88910226ee5fe7872174916304caceb6ca5e9e9135bdb3",
}
ROOT = Path(__file__).parents[3]
PLANNED = (*CODEC_SHAPES, "rda")
NAMES = [
    *(f"{name}-{plan}" for name in PLANNED for plan in ("gather", "sharded", "syncer")),
    *(f"low_bit-{plan}" for plan in ("sharded", "syncer")),
    *("e3m0-low_bit", "low_bit_open"),
    *("fragments", "overlap", "open", "narrow_state", "late", "late_overlap"),
]
EVEN, ODD = NAMES[::2], NAMES[1::2]


@pytest.mark.parametrize(
    ("capability", "one_thread", "two_threads"), [("default", EVEN, ODD), ("avx2", ODD, EVEN)]
)
def test_every_run_ends_with_the_golden_bits(
    tmp_path: Path, capability: str, one_thread: list[str], two_threads: list[str]
) -> None:
    """Run each variant under both capabilities and both numbers of threads."""
    program = Path(__file__).with_name("golden_program.py")
    variants = [*(f"{name}@1" for name in one_thread), *(f"{name}@2" for name in two_threads)]
    result = torch_process.run(
        [program, tmp_path, *variants],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    digests = dict(line.split() for line in result.stdout.splitlines())
    assert digests == {name: GOLDEN[name.rsplit("-", 1)[0]] for name in NAMES}
