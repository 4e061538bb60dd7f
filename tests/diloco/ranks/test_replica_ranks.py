"""``python -m diloco.replica`` under torchrun: several ranks, one replica."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from diloco.init import create_group
from diloco.protocol.records import Commit
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from diloco.replica import Rank
from diloco.store.base import LocalStore
from diloco.training.final_result import read_final
from tests import torch_process


def test_ranks_split_a_batch() -> None:
    batch = torch.arange(12).view(6, 2)
    shares = [Rank(number, 3).share({"ids": batch})["ids"] for number in range(3)]
    assert sorted(torch.cat(shares)[:, 0].tolist()) == batch[:, 0].tolist()
    assert Rank().share(batch) is batch


def test_an_indivisible_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a multiple of the replica's 4 ranks, found 6"):
        Rank(0, 4).share(torch.zeros(6, 2))


def test_two_ranks_train_the_built_in_workload_as_one_replica(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 2000)
    uri = str(tmp_path / "run")
    create_group(
        uri,
        GroupSettings(
            num_replicas=1,
            max_replicas=1,
            sync_every=2,
            total_rounds=2,
            batch_size=2,
            warmup_steps=0,
        ),
        workload=ByteGPTWorkload(size="demo", data=str(text), eval_bytes=512).to_dict(),
    )
    arguments = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "diloco.replica",
        uri,
    ]
    environment = os.environ | {"REPLICA_RANK": "0", "OMP_NUM_THREADS": "1"}
    done = torch_process.run(arguments, env=environment, timeout_s=120)
    assert done.returncode == 0, done.stderr
    store = LocalStore(Path(uri))
    final = read_final(store)
    assert final is not None and final.reason == "completed"
    commit = Commit.from_bytes(store.get("rounds/00000002/commit.json"))
    assert [c.replica for c in commit.contributors] == [0]
    assert commit.tokens_total == 2 * 2 * 2 * 128, "the ranks' tokens together, once"
