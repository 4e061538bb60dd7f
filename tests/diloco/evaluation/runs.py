"""A run in a folder with checkpoints of hand-made models, and token shards of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from diloco.data.shard_index import INDEX, SPLITS, ShardIndex
from diloco.data.shard_writer import PartWriter
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.records import CheckpointManifest, Identity
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import BYTES, VOCABULARY, ByteGPTWorkload
from diloco.store.base import LocalStore, Store
from diloco.training.checkpoint import put_tensors
from diloco.workloads.byte_gpt import ByteGPT

WORKLOAD = ByteGPTWorkload(size="demo", eval_bytes=1024)
WRITER = Identity(replica=0, incarnation=keys.incarnation(1, "0123abcd"))


def parrot(sharpness: float = 50.0) -> ByteGPT:
    """A model that repeats the last byte: its blocks add nothing, and its embedding is sharp."""
    model = ByteGPT(WORKLOAD.shape)
    model.initialise(0)
    with torch.no_grad():
        model.embedding.weight.mul_(sharpness)
    return model


def make_run(folder: Path, *, workload: ByteGPTWorkload = WORKLOAD) -> LocalStore:
    store = LocalStore(folder)
    settings = GroupSettings(num_replicas=1, max_replicas=2, batch_size=4)
    document = GroupDocument(
        run_id="r", name="by hand", settings=settings, workload=workload.to_dict()
    )
    assert store.create(keys.GROUP, document.to_bytes())
    return store


def write_checkpoint(store: Store, round: int, model: ByteGPT) -> CheckpointManifest:
    state = dict(model.state_dict())
    stored = put_tensors(
        store, f"{keys.checkpoint_dir(round, 0, WRITER.incarnation)}weights.safetensors", state
    )
    manifest = CheckpointManifest(
        round=round,
        writer=WRITER,
        model_hash="",
        base_rounds=(round,),
        tensors=(),
        weights_digest="",
        weights=stored,
        outer=None,
        tokens_total=0,
        wall_s=0.0,
    )
    store.create(keys.checkpoint_manifest(round), manifest.to_bytes())
    return manifest


def make_shards(folder: Path, text: bytes) -> str:
    """Token shards of bytes with ``text`` as training data and as held-out text."""
    store = LocalStore(folder)
    writer = PartWriter(store, 0, dtype=np.dtype(np.uint8), shard_tokens=1 << 20)
    for split in SPLITS:
        writer.add(np.frombuffer(text, np.uint8), split=split, ends=True)
    part = writer.close()
    index = ShardIndex(
        tokenizer=BYTES,
        tokenizer_digest=BYTES,
        vocabulary=VOCABULARY,
        end=None,
        train=part.train,
        held_out=part.held_out,
    )
    store.put(INDEX, index.to_bytes())
    return store.uri
