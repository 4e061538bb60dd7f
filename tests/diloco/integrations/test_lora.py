"""A Trainer with LoRA in a group: only the adapter is exchanged, stored and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from diloco.errors import ModelMismatch
from diloco.integrations.peft import write_adapter
from diloco.training.final_result import read_final
from diloco.training.stored_objects import load_tensors
from tests.diloco.conftest import TinyGroup

if TYPE_CHECKING:
    from tests.diloco.integrations.trainer_harness import Training

MakeGroup = Callable[..., TinyGroup]


def adapted(base_seed: int, adapter_seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    from tests.diloco.integrations.trainer_harness import tiny_model

    base = tiny_model(base_seed)
    torch.manual_seed(adapter_seed)
    config = LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True
    )
    return get_peft_model(base, config)


def make_training(folder: Path, group: TinyGroup, replica: int, *, base: int = 7) -> Training:
    from tests.diloco.integrations import trainer_harness

    return trainer_harness.make_training(
        folder, group, replica, model=adapted(base, adapter_seed=replica)
    )


def test_only_the_adapter_is_exchanged_stored_and_exported(
    tiny_group: MakeGroup, tmp_path: Path
) -> None:
    from peft import PeftModel

    from diloco.export import export
    from tests.diloco.integrations.trainer_harness import tiny_model

    group = tiny_group(num_replicas=2, sync_every=2, total_rounds=2, checkpoint_every=1)
    trainings = [make_training(tmp_path, group, replica) for replica in range(2)]
    for training in trainings:
        training.start()
    for training in trainings:
        training.wait()
    base = tiny_model(7)
    secret = base.transformer.wte.weight.detach().numpy().tobytes()[:32]
    objects = [path for path in group.root.rglob("*") if path.is_file()]
    assert not [path for path in objects if secret in path.read_bytes()]

    final = read_final(group.store)
    assert final is not None
    exchanged = load_tensors(group.store, final.weights)
    model = trainings[0].trainer.model
    assert exchanged.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(tensor.any() for name, tensor in exchanged.items() if "lora_B" in name)

    export(group.store, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged = [training.trainer.model.merge_and_unload().state_dict() for training in trainings]
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())
    assert all(torch.equal(tensor, merged[0][name]) for name, tensor in loaded.state_dict().items())


def test_an_adapter_of_another_base_model_is_refused_by_name(
    tiny_group: MakeGroup, tmp_path: Path
) -> None:
    group = tiny_group(num_replicas=1, sync_every=1, total_rounds=1)
    make_training(tmp_path, group, 0).start().wait()
    with pytest.raises(
        ModelMismatch,
        match=r"expected the frozen parameters of the group's model, found others: parameter 0: "
        r"expected base_model\.model\.transformer\.wte\.weight",
    ):
        make_training(tmp_path, group, 1, base=8).start().wait()


def test_other_adapters_than_lora_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"an adapter with peft_type 'LORA', found 'IA3'"):
        write_adapter(tmp_path, {"peft_type": "IA3", "adapter_name": "default"}, {})
    biased = {"peft_type": "LORA", "bias": "all", "adapter_name": "default"}
    with pytest.raises(ValueError, match=r"an adapter with bias 'none', found 'all'"):
        write_adapter(tmp_path, biased, {})
