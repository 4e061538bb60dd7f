"""LoRA adapters of the PEFT library: their description and their files.

Replicas exchange the adapter, and its base model never leaves them. The final weights of such a run
have the names of the model's parameters; :func:`write_adapter` gives them those that
``PeftModel.from_pretrained`` reads. Nothing here imports ``peft``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from diloco.model.named_parameters import bare

ADAPTER = "adapter_name"
"""Key of the adapter's name in the configuration; parameter names contain it."""
WRAPPER = "modules_to_save"


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model is a ``PeftModel``."""
    return isinstance(getattr(bare(model), "peft_config", None), dict)


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Return the ``adapter_config.json`` of a ``PeftModel`` and the name of its adapter."""
    adapted: Any = bare(model)
    name = adapted.active_adapter
    described = adapted.peft_config[name].to_dict()
    plain = {
        key: sorted(value) if isinstance(value, set) else value for key, value in described.items()
    }
    return {**plain, "inference_mode": True, ADAPTER: name}


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``. Raises :class:`ValueError`
    for another kind of adapter than LoRA, and for LoRA with trained biases."""
    for key, expected in (("peft_type", "LORA"), ("bias", "none")):
        if config.get(key) != expected:
            raise ValueError(
                f"config.json: expected an adapter with {key} {expected!r}, found "
                f"{config.get(key)!r}. Save it in the training script with model.save_pretrained"
            )
    described = {key: value for key, value in config.items() if key != ADAPTER}
    name = str(config[ADAPTER])
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(described, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(f"{text}\n")
    renamed = {_saved(key, name): tensor.contiguous() for key, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _saved(parameter: str, adapter: str) -> str:
    """Return the name of a parameter in an adapter's file: without the adapter's name after
    ``lora_A`` and the like, and without the wrapper of modules that are trained as a whole."""
    parts = parameter.split(".")
    return ".".join(
        part
        for index, part in enumerate(parts)
        if not (
            (part == adapter and index and parts[index - 1].startswith(("lora_", WRAPPER)))
            or (part == WRAPPER and parts[index + 1 : index + 2] == [adapter])
        )
    )
