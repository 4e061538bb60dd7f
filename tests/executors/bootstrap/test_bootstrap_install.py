"""The bootstrap installs missing requirements: real pip, a bare interpreter, wheels in a folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executors.base import CodeRef
from executors.bootstrap import command as bootstrap
from tests.executors.bundles import bare_environment, finish, put, run, zipped

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=1)]

TAG = "py3-none-any"


def wheel(
    folder: Path, name: str, version: str, *, needs: tuple[str, ...] = (), extra: str = ""
) -> None:
    """A wheel with one module that prints its version."""
    info = f"{name}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    lines += [f"Requires-Dist: {need}\n" for need in needs]
    lines += [f"Provides-Extra: {extra}\n"] * bool(extra)
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": "".join(lines),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {TAG}\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{version}-{TAG}.whl"
    made.write_bytes(zipped(files | {f"{info}/RECORD": record}))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    wheel(folder, "island", "1.0")
    wheel(folder, "island", "2.0")
    wheel(folder, "bay", "1.5", needs=("island>=1",))
    wheel(folder, "shoal", "1.0", needs=("island>=2",))
    wheel(folder, "torch", "2.0+image")
    wheel(folder, "torch", "9.0")
    wheel(folder, "lagoon", "1.0", needs=("torch>=1",))
    wheel(folder, "reef", "1.0", needs=("bay>=1; extra == 'fish'",), extra="fish")
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with pip and nothing else."""
    home = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=300)
    return home / "bin" / "python"


def site_packages(python: Path) -> Path:
    (folder,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    return folder


@pytest.fixture
def python(image: Path, wheels: Path) -> Iterator[Path]:
    packages = site_packages(image)
    before = set(packages.iterdir())
    yield image
    for added in set(packages.iterdir()) - before:
        shutil.rmtree(added) if added.is_dir() else added.unlink()


@pytest.fixture
def env(tmp_path: Path, wheels: Path) -> dict[str, str]:
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}
    return bare_environment(tmp_path / "kept", **own)


@pytest.fixture
def code(tmp_path: Path) -> Callable[..., CodeRef]:
    """Code that prints the installed versions, with these requirements."""
    program = (
        "import json; from importlib.metadata import distributions as d\n"
        "first = reversed(list(d()))\n"
        "print(json.dumps({x.metadata['Name']: x.version for x in first}))"
    )
    digest = put(tmp_path / "run", {"bundled.py": program})
    return lambda *lines: CodeRef(uri=str(tmp_path / "run"), sha256=digest, requirements=lines)


def installed(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {name: version for name, version in result.items() if name not in ("pip", "setuptools")}


def has(python: Path, *wanted: str, env: dict[str, str]) -> None:
    """Install wheels as pip does, which only unpacks wheels such as these."""
    for requirement in wanted:
        name, version = requirement.split("==")
        made = Path(env["PIP_FIND_LINKS"]) / f"{name}-{version}-{TAG}.whl"
        with zipfile.ZipFile(made) as archive:
            archive.extractall(site_packages(python))


def test_missing_requirements_are_installed_as_pinned(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    done = run(code("bay==1.5", "island==1.0"), env, python=python)
    assert installed(done) == {"bay": "1.5", "island": "1.0"}
    assert "installing bay==1.5, island==1.0" in done.stdout


def test_dependencies_are_constrained_to_the_pins(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    marked = "island==1.0; python_version >= '3'"
    done = run(code("bay", marked), env, python=python)
    assert installed(done) == {"bay": "1.5", "island": "1.0"}


def test_a_satisfied_pin_is_not_changed(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    has(python, "island==1.0", env=env)
    done = run(code("island==1.0", "shoal"), env, python=python)
    assert done.returncode == 78
    assert "Cannot install shoal" in done.stderr.splitlines()[-1]
    assert "shoal 1.0 depends on island>=2" in done.stdout
    assert installed(run(code("island==1.0"), env, python=python)) == {"island": "1.0"}


def test_another_version_is_replaced(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    has(python, "island==2.0", env=env)
    assert installed(run(code("island==1.0"), env, python=python)) == {"island": "1.0"}


def test_pip_is_not_run_for_installed_requirements(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    has(python, "island==1.0", "bay==1.5", "reef==1.0", env=env)
    nowhere = env | {"PIP_FIND_LINKS": "/nowhere"}
    requested = ("island==1.0", "bay>=1,<2", "reef[fish]", "never; python_version < '3'")
    done = run(code(*requested), nowhere, python=python)
    assert installed(done) == {"island": "1.0", "bay": "1.5", "reef": "1.0"}
    assert "installing" not in done.stdout


def test_requirements_of_an_extra_are_checked(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    has(python, "reef==1.0", env=env)
    assert "bay" in installed(run(code("reef[fish]"), env, python=python))


def test_the_images_torch_is_kept(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    has(python, "torch==2.0+image", env=env)
    done = run(code("torch==9.0", "lagoon"), env, python=python)
    assert installed(done) == {"torch": "2.0+image", "lagoon": "1.0"}


def test_without_torch_the_pinned_version_is_installed(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    done = run(code("torch==9.0", "lagoon"), env, python=python)
    assert installed(done) == {"torch": "9.0", "lagoon": "1.0"}


def test_an_unknown_requirement_is_a_permanent_failure(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    done = run(code("island==7.0"), env, python=python)
    assert done.returncode == 78
    last = done.stderr.splitlines()[-1]
    assert "requirement island==7.0 (from versions: 1.0, 2.0)" in last


@pytest.mark.parametrize("line", ["--index-url=http://elsewhere", "island = 1", "-r other.txt"])
def test_an_invalid_requirement_is_refused(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef], line: str
) -> None:
    done = run(code(line), env, python=python)
    assert done.returncode == 78
    assert f"expected a requirement, found {line!r}" in done.stderr


def test_an_unreachable_index_is_a_temporary_failure(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    away = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1", "PIP_NO_INDEX": "0"}
    done = run(code("island==7.0"), env | away, python=python)
    assert done.returncode == 75
    assert "could not reach the package index" in done.stderr.splitlines()[-1]


def test_sigterm_ends_a_waiting_pip(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and sends nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        hang = {"PIP_INDEX_URL": url, "PIP_NO_INDEX": "0", "PIP_TIMEOUT": "500"}
        command = bootstrap.command("bundled", python=str(python), code=code("island"))
        with subprocess.Popen(command, env=env | hang, stderr=subprocess.PIPE) as process:
            server.settimeout(60)
            connection, _ = server.accept()
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == 143
            connection.close()


def test_a_python_without_pip_gets_it(
    tmp_path: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "own"], check=True)
    done = run(code("island==1.0"), env, python=tmp_path / "own" / "bin" / "python")
    assert installed(done) == {"island": "1.0"}


def test_a_layer_does_not_change_the_python_below(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    has(python, "torch==2.0+image", "island==2.0", env=env)
    done = run(code("bay", "island==1.0", "lagoon"), env, python=python, layer=True)
    above = {"bay": "1.5", "island": "1.0", "lagoon": "1.0", "torch": "2.0+image"}
    assert installed(done).items() >= above.items()
    below = finish([str(python), "-m", "pip", "list", "--format=json"], env)
    names = {each["name"]: each["version"] for each in json.loads(below.stdout)}
    assert names["island"] == "2.0" and "bay" not in names
    # made once
    nowhere = env | {"PIP_FIND_LINKS": "/nowhere"}
    again = run(code("bay", "island==1.0", "lagoon"), nowhere, python=python, layer=True)
    assert installed(again) == installed(done) and "installing" not in again.stdout


def test_replicas_that_start_at_once_share_a_layer(
    python: Path, env: dict[str, str], code: Callable[..., CodeRef]
) -> None:
    ended: list[subprocess.CompletedProcess[str]] = []

    def start() -> None:
        ended.append(run(code("bay"), env, python=python, layer=True))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done.returncode for done in ended] == [0, 0, 0]
    assert "".join(done.stdout for done in ended).count("installing") == 1
    assert all("bay" in installed(done) for done in ended)
