"""Lightning's Trainers in a group: threads with separate modules and a shared folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.diloco.clocks import FastClock
from tests.diloco.conftest import TinyGroup

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from diloco.integrations.lightning import DiLoCoCallback

MakeGroup = Callable[..., TinyGroup]
PATIENCE_S = 900


def make_module(seed: int, *, broken_at: int = -1) -> LightningModule:
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layer = nn.Linear(4, 2)
            self.rates: list[float] = []
            self.logged: list[dict[str, float]] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            if batch_idx == broken_at:
                raise KeyError("no label")
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            x = batch["x"]
            return {"loss": (self.layer(x) - x[:, :2]).square().mean()}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def log_dict(self, values: dict[str, float], **options: Any) -> None:
            self.logged.append(values)

    return Regression()


class Training:
    """A Trainer in a thread."""

    def __init__(
        self, folder: Path, group: TinyGroup, replica: int, *, broken_at: int = -1, **options: Any
    ) -> None:
        from lightning.pytorch import Trainer

        from diloco.integrations.lightning import DiLoCoCallback

        self.module = make_module(100 + replica, broken_at=broken_at)
        self.callback: DiLoCoCallback = DiLoCoCallback(
            str(group.root), replica=replica, clock=FastClock()
        )
        self.trainer: Trainer = Trainer(
            **{"max_steps": 40, "max_epochs": -1, **options},
            callbacks=[self.callback],
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.randn(64, 4, generator=torch.Generator().manual_seed(replica))
        self.loader = torch.utils.data.DataLoader([{"x": row} for row in data], batch_size=8)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.fit, daemon=True)

    def fit(self) -> None:
        try:
            self.trainer.fit(self.module, self.loader)
        except BaseException as error:
            self.error = error

    def wait(self) -> Training:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self

    @property
    def reason(self) -> str:
        assert self.callback.group is not None
        return self.callback.group.reason


def test_two_trainers_end_with_the_same_weights(tiny_group: MakeGroup, tmp_path: Path) -> None:
    group = tiny_group(num_replicas=2, sync_every=3, total_rounds=4)
    trainings = [Training(tmp_path, group, 0), Training(tmp_path, group, 1, max_steps=-1)]
    for training in trainings:
        training.thread.start()
    for training in trainings:
        training.wait()
        assert training.reason == "completed"
        assert training.trainer.global_step == 12
        rounds = [
            (each["diloco/round"], each["diloco/contributors"]) for each in training.module.logged
        ]
        assert rounds == [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (4.0, 2.0)]
    one, other = (training.module.layer.weight for training in trainings)
    assert torch.equal(one, other)
    assert group.commits()[-1].tokens_total == 2 * 12 * 8


def test_accumulated_batches_are_one_step(tiny_group: MakeGroup, tmp_path: Path) -> None:
    group = tiny_group(num_replicas=1, sync_every=2, total_rounds=2)
    training = Training(tmp_path, group, 0, accumulate_grad_batches=2)
    training.thread.start()
    assert training.wait().trainer.global_step == 4
    first = group.commits()[0]
    assert first.tokens_total == 2 * 2 * 8


def test_a_late_trainer_has_the_learning_rate_of_the_run(
    tiny_group: MakeGroup, tmp_path: Path
) -> None:
    group = tiny_group(num_replicas=1, sync_every=2, total_rounds=4)
    first = Training(tmp_path, group, 0, max_steps=5)
    first.thread.start()
    assert first.wait().reason == "left"
    late = Training(tmp_path, group, 1)
    late.thread.start()
    assert late.wait().reason == "completed"
    assert late.module.rates[0] == pytest.approx(0.1 / 5)  # the fifth step of the run

    ended = Training(tmp_path, group, 0)
    ended.thread.start()
    assert ended.wait().trainer.global_step == 0
    assert torch.equal(ended.module.layer.weight, late.module.layer.weight)


def test_an_exception_leaves_the_group(tiny_group: MakeGroup, tmp_path: Path) -> None:
    group = tiny_group(num_replicas=1)
    training = Training(tmp_path, group, 0, broken_at=1)
    training.thread.start()
    with pytest.raises(KeyError, match="no label"):
        training.wait()
    [beat] = [each.key for each in group.store.list("members/") if each.key.endswith("beat.json")]
    assert b'"state":"failed"' in group.store.get(beat)


def test_what_cannot_be_counted_or_would_train_on_is_refused(
    tiny_group: MakeGroup, tmp_path: Path
) -> None:
    from diloco.integrations.lightning import _loss, _rows

    training = Training(tmp_path, tiny_group(num_replicas=1), 0, min_steps=3)
    training.thread.start()
    with pytest.raises(ValueError, match=r"min_steps: expected none.*found 3"):
        training.wait()
    assert _rows(["text", {"id": 3, "x": torch.ones(5, 2)}]) == 5
    with pytest.raises(ValueError, match=r"expected a tensor in each batch, found str.*tokens="):
        _rows("text")
    with pytest.raises(ValueError, match=r"expected training_step to return its loss.*NoneType"):
        _loss(None)
