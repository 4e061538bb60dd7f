"""The names of ``import diloco``, and modules that are commands and functions."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import diloco
from diloco.protocol.settings import SettingsError


def test_dir_lists_exactly_the_public_names() -> None:
    assert [name for name in dir(diloco) if not name.startswith("__")] == sorted(diloco.__all__)


def test_every_public_name_can_be_loaded() -> None:
    for name in diloco.__all__:
        assert getattr(diloco, name) is not None


@pytest.mark.parametrize("command", ["inspect", "simulate"])
@pytest.mark.parametrize("before", ["", "import diloco.{0}\n", "from diloco.{0} import {0}\n"])
def test_a_command_is_a_function_whatever_was_imported(command: str, before: str) -> None:
    code = (
        "import sys, diloco\n"
        + before.format(command)
        + f"assert callable(diloco.{command})\n"
        + f"from diloco import {command}\n"
        + f"assert {command} is diloco.{command} and callable({command}.main)\n"
        + "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_call_of_the_module_is_a_call_of_its_function(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    created = diloco.create_group(uri, diloco.GroupSettings(num_replicas=3))
    picture = diloco.inspect(uri, once=True)
    assert isinstance(picture, diloco.Picture)
    assert picture.document == created
    assert dataclasses.is_dataclass(picture) and picture.rounds == ()
    assert list(inspect.signature(diloco.inspect).parameters) == ["run", "scope", "once", "clock"]


def test_a_simulation_has_the_estimate_and_all_reduce_plans() -> None:
    request = diloco.PlanRequest(settings=diloco.GroupSettings(), parameters=10**8, step_s=1.0)
    result = diloco.simulate(request)
    assert isinstance(result, diloco.Simulation)
    assert result.reduce_plans[result.estimate.traffic.mode] == result.estimate
    assert set(result.bandwidths) == {0.9, 0.95, 0.99}
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.estimate.rounds = 0  # type: ignore[misc]
    with pytest.raises(SettingsError, match="step_s: expected more than 0"):
        dataclasses.replace(request, step_s=0.0)
