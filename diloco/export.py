"""``python -m diloco.export URI DIR``: export the weights of a run for ``from_pretrained``.

Reads the final weights, or the newest checkpoint if the run has not ended, and writes the files of
Transformers' ``save_pretrained`` (``config.json``, ``model.safetensors`` and the tokenizer) and a
model card.
``--push-to-hub NAME`` uploads the directory to the Hugging Face Hub with its own client and login
(``hf auth login`` or ``HF_TOKEN``).

A run that trained a LoRA adapter is exported as the adapter, for ``PeftModel.from_pretrained``.

Supports runs of the ``huggingface`` workload and of Transformers' Trainer. A Trainer run does not
record its tokenizer; pass ``--tokenizer``. The built-in byte-level GPT is not a Transformers model
and cannot be exported; its weights are in the bucket as safetensors.
"""

from __future__ import annotations

from diloco.errors import without_module

try:
    import torch  # noqa: F401
    import transformers
except ModuleNotFoundError as missing:
    raise without_module(missing, "torch,transformers", caller=__name__) from None

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from diloco.command_line import add_common_options
from diloco.error_lines import print_error
from diloco.errors import ReplicaError
from diloco.evaluation.weights import load_into
from diloco.integrations.peft import ADAPTER, write_adapter
from diloco.model_card import card_of_export, write_card
from diloco.protocol.group_document import GroupDocument, ProtocolMismatch
from diloco.protocol.records import FinalManifest
from diloco.protocol.workload import HuggingFaceWorkload
from diloco.store.base import MissingKey, Store, StoreError
from diloco.store.open import open_store
from diloco.training.checkpoint import newest_manifest
from diloco.training.final_result import read_final
from diloco.training.initial_state import read_document
from diloco.training.stored_objects import get_object, load_tensors
from diloco.workloads.huggingface import model_config
from diloco.workloads.tokens import Tokenizer, load_tokenizer


def export(store: Store, folder: Path, *, tokenizer: str = "") -> str:
    """Write the newest weights of the run into ``folder``; return a one-line summary.

    ``tokenizer`` is a directory, a name on the Hub or ``bytes``; it replaces the workload's.
    Raises :class:`ValueError` or :class:`ReplicaError` if the run has no weights that can be
    exported.
    """
    document = read_document(store)
    loaded_tokenizer = _tokenizer(document, tokenizer)
    try:
        if final := read_final(store):
            config = json.loads(get_object(store, final.config))
            tensors = load_tensors(store, final.weights)
            source, round_ = f"final weights, round {final.round}", final.round
            summary = _summary(store, final)
        elif newest := newest_manifest(store):
            config = _described(document, loaded_tokenizer)
            tensors, summary = load_tensors(store, newest.weights), {}
            source, round_ = f"checkpoint, round {newest.round}", newest.round
        else:
            raise ValueError(
                f"expected weights of run {document.name!r} at {store.uri}, "
                "found neither a final nor a checkpoint yet"
            )
    except MissingKey as error:
        raise ValueError(f"expected the object {error} that a manifest names, found none") from None
    if ADAPTER in config:
        write_adapter(folder, config, tensors)
    else:
        model = build(config)
        load_into(model, tensors)
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
    if loaded_tokenizer is not None:
        loaded_tokenizer.transformer.save_pretrained(folder)
    card = card_of_export(
        document,
        source=source,
        round=round_,
        library="peft" if ADAPTER in config else "transformers",
        summary=summary,
    )
    write_card(folder, card)
    return f"{document.name}: {source}, {sum(t.numel() for t in tensors.values()):,} parameters"


def build(config: Mapping[str, Any]) -> Any:
    """Create an untrained model of the class and shape that ``config.json`` describes."""
    if "model_type" not in config:
        raise ValueError(
            "config.json: expected the 'model_type' of a Transformers model, found none; "
            "only such a run can be exported"
        )
    settings = AutoConfig.for_model(**config)
    (architecture,) = config.get("architectures") or [""]
    named = getattr(transformers, architecture, None)
    if isinstance(named, type) and issubclass(named, PreTrainedModel):
        make: Any = named
        return make._from_config(settings)
    return AutoModelForCausalLM.from_config(settings)


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload the directory as the model ``name``; return the URL of the repository."""
    api = HfApi()
    repository = str(api.create_repo(name, private=private or None, exist_ok=True))
    api.upload_folder(repo_id=name, folder_path=folder, commit_message="Weights of a DiLoCo run")
    return repository


def _summary(store: Store, final: FinalManifest) -> Mapping[str, Any]:
    """The summary of the final weights; empty if it cannot be read, because only the card needs
    it."""
    try:
        summary = json.loads(get_object(store, final.summary))
    except (MissingKey, ReplicaError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _tokenizer(document: GroupDocument, name: str) -> Tokenizer | None:
    if name:
        return load_tokenizer(name)
    if document.workload.get("kind") != HuggingFaceWorkload.kind:
        return None
    workload = HuggingFaceWorkload.from_dict(document.workload)
    return load_tokenizer(
        workload.tokenizer_name, revision="" if workload.tokenizer else workload.revision
    )


def _described(document: GroupDocument, tokenizer: Tokenizer | None) -> Mapping[str, Any]:
    if document.workload.get("kind") != HuggingFaceWorkload.kind or tokenizer is None:
        raise ValueError(
            f"expected final weights of run {document.name!r}, found only a checkpoint, which has "
            "no model configuration"
        )
    workload = HuggingFaceWorkload.from_dict(document.workload)
    config: Mapping[str, Any] = model_config(workload, tokenizer).to_dict()
    return config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.export",
        description="Export the weights of a run as a directory for from_pretrained.",
    )
    add_common_options(parser)
    parser.add_argument("uri", help="rendezvous URI of the run")
    parser.add_argument("folder", type=Path, help="directory to write")
    parser.add_argument("--tokenizer", default="", help="directory, name on the Hub or 'bytes'")
    parser.add_argument("--push-to-hub", metavar="NAME", help="upload to the Hub under this name")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    arguments = parser.parse_args(argv)
    try:
        print(export(open_store(arguments.uri), arguments.folder, tokenizer=arguments.tokenizer))
        if arguments.push_to_hub:
            print(push(arguments.folder, arguments.push_to_hub, private=arguments.private))
    except (ValueError, ReplicaError, ProtocolMismatch, StoreError, HfHubHTTPError, OSError) as e:
        print_error(e, uri=arguments.uri, verbose=arguments.verbose)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
