"""The lists of CONTRIBUTING.md: each names the files that an addition touches, and no others.

A toy workload and a toy codec are added to the registries of the lists; files outside a list that
name what is built in are listed here with the reason.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from dashboard.api.document import RunDocument, document_of, draft_of
from dashboard.forms import RunForm
from dashboard.forms.run import DERIVED
from diloco.codecs import get_codec
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.payload_size import CODEC_SHAPES, FULL_MEAN, LOW_BIT_CODECS
from diloco.protocol.settings import GroupSettings, setting_fields
from diloco.protocol.workload import WORKLOADS, WorkloadDocument
from diloco.workloads import load_workload
from tests.source_texts import files_that_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PRODUCT = ("archipelago", "dashboard", "diloco", "executors", "runs", "static/js", "templates")
ADDITIONS = ("setting", "codec", "workload", "page", "backend")

BLOCK_CODECS = re.compile(r"(?<![\w-])(int8|e3m0)(?![\w-])")
"""``fp32`` and ``bf16`` are also types, and ``topk`` is also a setting."""
NAMES_A_CODEC = {
    "diloco/protocol/payload_size.py": "the list of codecs",
    "diloco/codecs/blocks.py": "the codecs",
    "diloco/torchft/tensor_codec.py": "quantised tensors of the Manager are always int8",
}
WORKLOAD_CLASSES = re.compile(rf"\b({'|'.join(each.__name__ for each in WORKLOADS.values())})\b")
NAMES_A_WORKLOAD = {
    "dashboard/forms/custom.py": "its part of the submit form",
    "dashboard/forms/huggingface.py": "its part of the submit form",
    "dashboard/forms/pasted.py": "the default workload",
    "dashboard/forms/run.py": "its part of the submit form",
    "diloco/evaluation/language_model.py": "the tokenizers of language models",
    "diloco/export.py": "exports models of the Transformers library",
    "diloco/generate.py": "samples text from the built-in model",
    "diloco/init.py": "options for the built-in workload",
    "diloco/workloads/documents.py": "texts of the workload huggingface",
    "runs/export/hub_files.py": "exports models of the Transformers library",
    "runs/local_access.py": "code of the user needs a permission",
    "runs/submit/create.py": "code of the user is checked",
    "runs/submit/preflight.py": "token shards",
    "runs/submit/run_draft.py": "ready-made templates",
    "runs/submit/shard_check.py": "token shards",
}
"""Product files that name a built-in workload -> why they can."""


def places(thing: str) -> list[str]:
    """The first column of the table of "Add a <thing>"."""
    section = TEXT.partition(f"\n## Add a {thing}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    assert rows[:1] == ["file"], thing
    return rows[2:]


@pytest.mark.parametrize("thing", ADDITIONS)
def test_listed_files_exist(thing: str) -> None:
    for place in places(thing):
        for path in re.findall(r"`([\w./<>-]+)`|\]\(([\w./-]+)", place):
            name = "".join(path)
            if "<" in name:
                name = name.partition("<")[0].rpartition("/")[0]
            assert (ROOT / name).exists(), name


def test_the_lists_are_short() -> None:
    assert places("backend")[:2] == ["`executors/<name>/`", "`executors/registry.py`"]
    assert places("codec")[:3] == [
        "`diloco/protocol/payload_size.py`",
        "`diloco/codecs/<name>.py`",
        "`diloco/codecs/__init__.py`",
    ]
    assert places("workload")[:2] == [
        "`diloco/protocol/workload.py`",
        "`diloco/workloads/<kind>.py`",
    ]
    assert places("setting")[0] == "`diloco/protocol/settings.py`"


def test_no_other_product_file_names_a_codec() -> None:
    assert files_that_name(BLOCK_CODECS, PRODUCT) == set(NAMES_A_CODEC)


def test_settings_and_classes_have_the_codecs_of_the_list() -> None:
    choices = {spec.name: spec.choices for spec in setting_fields()}
    assert choices["codec"] == tuple(CODEC_SHAPES)
    assert choices["mean_codec"] == (FULL_MEAN, *LOW_BIT_CODECS)
    assert [get_codec(name).name for name in CODEC_SHAPES] == list(CODEC_SHAPES)


def test_no_other_product_file_names_a_workload() -> None:
    named = files_that_name(WORKLOAD_CLASSES, PRODUCT)
    own = {f"diloco/workloads/{kind}.py" for kind in WORKLOADS}
    assert named - own == set(NAMES_A_WORKLOAD)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_class_of_the_list_is_complete(kind: str) -> None:
    described = WORKLOADS[kind]
    assert described.kind == kind
    assert described.model_fields
    assert {*described.model_fields} <= {field.name for field in fields(described)}
    assert (ROOT / "diloco" / "workloads" / f"{kind}.py").exists()


@dataclass(frozen=True, kw_only=True)
class ToyWorkload(WorkloadDocument):
    width: int = 4

    kind: ClassVar[str] = "toy"
    model_fields: ClassVar[tuple[str, ...]] = ("width",)


@pytest.mark.django_db
def test_a_workload_needs_a_class_and_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_training(workload: ToyWorkload, settings: GroupSettings, **given: Any) -> Any:
        return workload, settings, given["replica"]

    monkeypatch.setitem(WORKLOADS, "toy", ToyWorkload)
    module = SimpleNamespace(load_training=load_training)
    monkeypatch.setitem(sys.modules, "diloco.workloads.toy", module)

    sent = {"name": "Toy", "workload": {"kind": "toy", "width": 8}, "pools": [{}]}
    draft = draft_of(RunDocument.model_validate(sent))
    assert draft.workload == ToyWorkload(width=8)
    assert document_of(draft)["workload"] == {"kind": "toy", "width": 8}
    group = GroupDocument.new(draft.settings, workload=draft.workload.to_dict())
    expected = (draft.workload, draft.settings, 3)
    assert load_workload(group, replica=3, device="cpu") == expected


@pytest.mark.django_db
def test_the_form_has_a_field_for_each_setting() -> None:
    settings = {field.name for field in fields(GroupSettings)}
    assert {spec.name for spec in setting_fields()} == settings
    assert settings - DERIVED <= set(RunForm().fields)
    schema = RunDocument.model_json_schema()["properties"]["settings"]["properties"]
    assert set(schema) == settings
