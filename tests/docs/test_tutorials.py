"""The run documents of the tutorials are valid, and the planner prints what they show."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dashboard.api.document import RunDocument, draft_of
from diloco import simulate
from diloco.protocol.workload import WORKLOADS
from runs.submit.pool_check import check_pool

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


def blocks(page: str, kind: str) -> list[str]:
    text = (TUTORIALS / page).read_text()
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.django_db
@pytest.mark.parametrize("page", ["laptop-and-cloud.md", "one-billion.md"])
def test_run_documents_are_valid(page: str) -> None:
    [text] = blocks(page, "toml")
    document: dict[str, Any] = tomllib.loads(text)
    del document["store_credential"]
    for pool in document["pools"]:
        pool.pop("credential", None)
    workload = document["workload"]
    if "archive" in workload:
        assert (ROOT / "examples" / workload.pop("archive") / "spirals.py").exists()
    draft = draft_of(RunDocument.model_validate_json(json.dumps(document)))
    assert draft.settings.num_replicas == sum(pool.count for pool in draft.pools)
    assert WORKLOADS[workload["kind"]].from_dict(workload)
    for pool in draft.pools:
        check_pool(pool)


def test_the_planner_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = blocks("one-billion.md", "")[:1]
    command, _, expected = shown.replace("\\\n", " ").partition("\n")
    arguments = shlex.split(command.removeprefix("$ python -m diloco.simulate"))
    assert simulate.main(arguments) == 0
    assert capsys.readouterr().out == expected
