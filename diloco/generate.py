"""``python -m diloco.generate URI``: sample text from the model of a run.

Reads ``group.json``, ``final/manifest.json`` and the objects that they name; it needs no database
and no training data. It verifies digests and unpickles nothing. If the run has not ended, it uses
the newest checkpoint and reports that on standard error.

Supports the built-in byte-level GPT only, one sample at a time, without a key-value cache.
"""

from __future__ import annotations

from diloco.errors import without_module

try:
    import torch
except ModuleNotFoundError as missing:
    raise without_module(missing, "torch", caller=__name__) from None

import argparse
import codecs
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.command_line import add_common_options
from diloco.error_lines import print_error
from diloco.errors import ReplicaError
from diloco.evaluation.weights import load_into
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.workload import STDLIB, ByteGPTWorkload
from diloco.store.base import MissingKey, Store, StoreError
from diloco.store.open import open_store
from diloco.training.checkpoint import newest_manifest
from diloco.training.final_result import read_final
from diloco.training.sample import SAMPLE_BYTES, SEED, TEMPERATURE
from diloco.training.stored_objects import get_object, load_tensors
from diloco.workloads.base import first_words
from diloco.workloads.byte_gpt import ByteGPT, model_config, model_from_config, sample_bytes


@dataclass(frozen=True, kw_only=True)
class Result:
    """A model with the weights after ``round``; ``final`` is False for those of a checkpoint."""

    model: ByteGPT
    run: str
    round: int
    final: bool


def load_result(store: Store) -> Result:
    """Load the newest weights of a run. Raises :class:`ValueError` if there are none, or if they
    do not match the model."""
    try:
        document = GroupDocument.read(store)
    except MissingKey:
        raise ValueError(f"expected a run at {store.uri}, found no {keys.GROUP}") from None
    try:
        if final := read_final(store):
            config = _config(get_object(store, final.config))
            tensors, round = load_tensors(store, final.weights), final.round
        elif newest := newest_manifest(store):
            config = model_config(ByteGPTWorkload.from_dict(document.workload))
            tensors, round = load_tensors(store, newest.weights), newest.round
        else:
            raise ValueError(
                f"expected weights of run {document.name!r} at {store.uri}, "
                "found neither a final nor a checkpoint yet"
            )
    except MissingKey as error:
        raise ValueError(f"expected the object {error} that a manifest names, found none") from None
    except ReplicaError as error:
        raise ValueError(str(error)) from None
    model = model_from_config(config)
    load_into(model, tensors)
    return Result(model=model, run=document.name, round=round, final=final is not None)


def _config(data: bytes) -> Mapping[str, Any]:
    config = json.loads(data)
    if not isinstance(config, dict):
        raise ValueError(f"config.json: expected an object, found {type(config).__name__}")
    if "kind" not in config:
        raise ValueError(
            f"config.json: expected kind {ByteGPTWorkload.kind!r}, found none: the model of a loop "
            "is not in the bucket. Sample in the loop, from the model that holds the final weights"
        )
    return config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.generate", description="Sample text from the model of a run."
    )
    add_common_options(parser)
    parser.add_argument("uri", help="rendezvous URI of the run")
    parser.add_argument(
        "--prompt", default=first_words(STDLIB), help="text to continue (default: 'def ')"
    )
    parser.add_argument("--bytes", type=int, default=SAMPLE_BYTES, help="number of bytes to sample")
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, help="0 always takes the most likely byte"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args(argv)
    try:
        if arguments.bytes < 0:
            raise ValueError(f"--bytes: expected 0 or more, found {arguments.bytes}")
        result = load_result(open_store(arguments.uri))
        source = "final weights" if result.final else "no final weights yet; newest checkpoint"
        print(f"{result.run}: {source}, round {result.round}", file=sys.stderr)
        stream = sample_bytes(
            result.model.to("cuda" if torch.cuda.is_available() else "cpu"),
            arguments.prompt.encode(),
            arguments.bytes,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        # A character can have several bytes, and the model can sample a part of one.
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        sys.stdout.write(arguments.prompt)
        for byte in stream:
            sys.stdout.write(text.decode(bytes([byte])))
            sys.stdout.flush()
        sys.stdout.write(text.decode(b"", final=True) + "\n")
    except (ValueError, StoreError) as error:
        print_error(error, uri=arguments.uri, verbose=arguments.verbose)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
