"""The custom workload: its document, its calls and its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.init import create_group, main
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.protocol.workload import WORKLOADS, CustomWorkload
from diloco.store.base import LocalStore
from diloco.workloads import load_workload
from diloco.workloads.custom import CustomTraining

SETTINGS = GroupSettings(seed=7, sync_every=10, total_rounds=3, warmup_steps=0)
CPU = torch.device("cpu")

MODULE = """
import torch
from torch import nn

class Own:
    def __init__(self, **given): self.given = given
    def build_model(self): return nn.Linear(1, 1)
    def inner_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=1.0)
    def lr_at(self, step): return 1
    def train_batch(self, step): return torch.ones(3, 1)
    def loss(self, model, batch): return model(batch).sum().reshape(1)
    def tokens(self, batch): return len(batch)
    def evaluate(self, model): return 0.5, 3
    def config(self): return {"own": True}

def build(**given): return Own(**given)
def picky(*, seed, replica): return Own()
def nothing(**given): return None
def half(**given):
    own = Own(); own.loss = None; own.tokens = 3
    return own
def failing(**given): raise KeyError(given["arguments"]["x"])
number = 3
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a good module and two bad ones."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_workload.py").write_text(MODULE)
    (tmp_path / "in_need.py").write_text("import numpy, not_there_at_all\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    names = ("own_workload", "in_need", "broken")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def loaded(function: str, *, replica: int = 2, **more: Any) -> Any:
    workload = {"kind": "custom", "function": function, **more}
    document = GroupDocument(run_id="r", name="n", settings=SETTINGS, workload=workload)
    return load_workload(document, replica=replica, device="cpu")


def test_the_function_gets_the_documented_arguments(path: Path) -> None:
    training = loaded("own_workload:build", arguments={"width": 3})
    assert training._workload.given == {
        "seed": 7,
        "replica": 2,
        "device": CPU,
        "total_steps": 30,
        "settings": SETTINGS,
        "arguments": {"width": 3},
    }
    model = training.build_model()
    assert training.loss(model, training.train_batch(0)).shape == ()
    assert (training.lr_at(0), training.tokens(torch.ones(3, 1))) == (1.0, 3)
    assert training.evaluate(model) == (0.5, 3)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "no_such_module:build",
            "expected a module no_such_module on the path, found no",
        ),
        ("own_workload.deeper:build", "expected a module own_workload.deeper on the path"),
        ("in_need:build", "expected not_there_at_all, which in_need imports .*requirements.*none"),
        ("own_workload:missing", r"expected a function missing in own_workload \(.*own_workload"),
        ("own_workload:number", "expected a function number in .*, found int"),
        ("own_workload:picky", "expected a function that takes seed, replica, device, total_steps"),
        ("own_workload:nothing", "expected a workload with methods .*, found NoneType without"),
        ("own_workload:half", r"found own_workload.Own without loss, tokens$"),
    ],
)
def test_a_workload_that_cannot_be_built_is_a_settings_error(
    path: Path, function: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=f"^workload: {function}: .*{words}") as caught:
        loaded(function)
    assert caught.value.field == "workload"


def test_exceptions_of_user_code_propagate_with_a_note(path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        loaded("own_workload:failing", arguments={"x": "y"})
    assert caught.value.__notes__ == ["in own_workload:failing, the function of the workload"]
    with pytest.raises(ZeroDivisionError) as broken:
        loaded("broken:build")
    assert "on importing broken" in broken.value.__notes__[0]


class Wrong:
    """A workload all of whose methods return ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given: self.value


@pytest.mark.parametrize(
    ("method", "given", "value", "words"),
    [
        ("build_model", (), dict, "expected build_model() to return a torch.nn.Module, found type"),
        ("inner_optimizer", (nn.Linear(1, 1),), 3, "or a sequence of them, found int 3"),
        ("inner_optimizer", (nn.Linear(1, 1),), [], "or a sequence of them, found list []"),
        ("lr_at", (0,), "0.1", "a number of 0 or more, found str '0.1'"),
        ("lr_at", (0,), -0.1, "a number of 0 or more, found float -0.1"),
        ("lr_at", (0,), float("nan"), "found float nan"),
        ("loss", (None, None), 3.0, "a tensor of one element, with a graph, found float 3.0"),
        ("loss", (None, None), torch.ones(()), "found a tensor of shape () without a graph"),
        ("loss", (None, None), torch.ones(2, requires_grad=True), "of shape (2,) with a graph"),
        ("tokens", (None,), 1.5, "expected tokens() to return a count, found float 1.5"),
        ("tokens", (None,), True, "found bool True"),
        ("tokens", (None,), -1, "found int -1"),
        ("evaluate", (None,), 0.5, "(mean loss, tokens), a float and an int, found float 0.5"),
        ("evaluate", (None,), (torch.ones(()), 1), "(mean loss, tokens)"),
        ("config", (), {"a": {1}}, "expected config() to return a JSON-serialisable mapping"),
        ("config", (), [], "found list []"),
    ],
)
def test_return_values_are_checked(
    method: str, given: tuple[Any, ...], value: Any, words: str
) -> None:
    training = CustomTraining("mine:build", Wrong(value))  # type: ignore[arg-type]
    with pytest.raises(SettingsError) as caught:
        getattr(training, method)(*given)
    assert str(caught.value).startswith("workload: mine:build: expected ")
    assert words in str(caught.value)


def test_a_document_survives_a_round_trip() -> None:
    workload = CustomWorkload(
        function="a.b:c",
        arguments={"x": [1, {"y": None}]},
        archive="0" * 64,
        requirements=("einops==0.8", "x @ https://example.org/x.whl"),
    )
    assert WORKLOADS["custom"].from_dict(workload.to_dict()) == workload
    assert CustomWorkload.from_dict({"kind": "custom", "function": "a:b"}).requirements == ()
    document = GroupDocument(
        run_id="r", name="n", settings=GroupSettings(), workload=workload.to_dict()
    )
    again = GroupDocument.from_bytes(document.to_bytes()).workload
    assert CustomWorkload.from_dict(again) == workload


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"kind": "other"}, "kind", "expected 'custom', found 'other'"),
        ({"function": ""}, "function", "expected 'package.module:function', found ''"),
        ({"function": 3}, "function", "found 3"),
        ({"function": "module.function"}, "function", "found 'module.function'"),
        ({"function": "../evil:build"}, "function", "found '../evil:build'"),
        ({"function": "a:b\n"}, "function", "found 'a:b"),
        ({"arguments": [1]}, "arguments", r"expected an object, found \[1\]"),
        ({"archive": "main.zip"}, "archive", "expected a sha256 .*, found 'main.zip'"),
        ({"archive": None}, "archive", "found None"),
        ({"requirements": "einops"}, "requirements", "expected a list, found 'einops'"),
        ({"requirements": ["-r other.txt"]}, "requirements", "found '-r other.txt'"),
        ({"requirements": ["--index-url=x"]}, "requirements", "found '--index-url=x'"),
        ({"requirements": ["a\n-r b"]}, "requirements", "pip requirements"),
        ({"requirements": [""]}, "requirements", "found ''"),
        ({"requirements": [3]}, "requirements", "found 3"),
        ({"turbo": 1}, "workload", "turbo"),
    ],
)
def test_an_invalid_document_names_the_field(
    changes: Mapping[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        CustomWorkload.from_dict({"kind": "custom", "function": "a:b", **changes})
    assert caught.value.field == field


def test_a_group_is_created_from_a_file(tmp_path: Path) -> None:
    described = tmp_path / "workload.json"
    described.write_text('{"kind": "custom", "function": "a:b"}')
    assert main([str(tmp_path / "run"), "--workload", str(described)]) == 0
    document = GroupDocument.from_bytes(LocalStore(tmp_path / "run").get("group.json"))
    assert document.workload == CustomWorkload(function="a:b").to_dict()
    described.write_text('{"kind": "custom", "function": "a"}')
    assert main([str(tmp_path / "other"), "--workload", str(described)]) == 1


def test_a_replica_without_the_module_exits_with_ex_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diloco import replica
    from diloco.exit_codes import EX_CONFIG

    uri = str(tmp_path / "run")
    create_group(uri, SETTINGS, workload=CustomWorkload(function="not_here:build").to_dict())
    monkeypatch.setenv("REPLICA_RANK", "0")
    assert replica.main([uri]) == EX_CONFIG
    assert "not_here:build: expected a module not_here" in capsys.readouterr().err
