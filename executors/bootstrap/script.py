"""Bootstrap of a job in a bare image; sent as text by :mod:`executors.bootstrap.command`.

``sys.argv``: a name, a JSON document (uri, sha256, archives, requirements, layer), the entrypoint
and its arguments. The script installs missing requirements, fetches the code, verifies its digest,
and executes ``python -m ENTRYPOINT ARGS`` in the same process, so that signals reach the replica.

It imports only the standard library; packaging, pip, obstore and fsspec are imported on use. Exit
codes: 75 for a temporary failure (network), 78 for a permanent one, 143 after SIGTERM.
"""

# No __future__ imports: the packed form puts a statement before them (executors.bootstrap.command).
import errno
import fcntl
import hashlib
import importlib
import importlib.util
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

EX_TEMPFAIL, EX_CONFIG, EX_TERMINATED = 75, 78, 143
TRIES, TRIES_OF_A_RUN, FIRST_PAUSE_S = 4, 8, 0.25
LIMIT_BYTES = 1 << 28
"""Size limit of an archive, because it is read into memory."""

KEPT = ("torch", "torchvision", "torchaudio")
"""Packages whose installed build is kept in any version: it matches the image's GPU."""

NO_NETWORK = (
    "Retrying (Retry(",
    "Max retries exceeded",
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Temporary failure in name resolution",
    "Connection refused",
    "Connection reset",
    "Server Error",
    "Too Many Requests",
)
"""Parts of pip's messages when it cannot reach an index; its last message is then "no match"."""


class Stop(Exception):
    """Ends the script with an exit code and a message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def log(text: str) -> None:
    print("bootstrap: " + text, flush=True)


# --- requirements ---------------------------------------------------------------------------------


def load_packaging() -> tuple[Any, Any]:
    """The modules ``requirements`` and ``utils`` of packaging, or of pip's vendored copy."""
    if not any(importlib.util.find_spec(name) for name in ("packaging", "pip")):
        ensure_pip()
    is_installed = importlib.util.find_spec("packaging")
    home = "packaging" if is_installed else "pip._vendor.packaging"
    return importlib.import_module(f"{home}.requirements"), importlib.import_module(f"{home}.utils")


def ensure_pip() -> None:
    if importlib.util.find_spec("pip"):
        return
    result = subprocess.run([sys.executable, "-m", "ensurepip"], capture_output=True, text=True)
    importlib.invalidate_caches()
    if result.returncode or not importlib.util.find_spec("pip"):
        raise Stop(
            EX_CONFIG, "expected pip in " + sys.executable + ", found none: " + result.stderr
        )


def parse(lines: Iterable[str]) -> list[Any]:
    requirements, _ = load_packaging()
    parsed = []
    for line in lines:
        try:
            wanted = requirements.Requirement(line)
        except requirements.InvalidRequirement as error:
            raise Stop(EX_CONFIG, f"expected a requirement, found {line!r}: {error}") from None
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            parsed.append(wanted)
    return parsed


def is_installed(wanted: Any) -> bool:
    """Whether this Python satisfies a requirement, including its extras."""
    requirements, utils = load_packaging()
    if utils.canonicalize_name(wanted.name) in KEPT and importlib.util.find_spec(wanted.name):
        return True
    try:
        installed = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return False
    if wanted.url:
        return bool(
            wanted.url == json.loads(installed.read_text("direct_url.json") or "{}").get("url")
        )
    if not wanted.specifier.contains(installed.version, prereleases=True):
        return False
    of_extras = [
        needed
        for needed in map(requirements.Requirement, installed.requires or ())
        for extra in wanted.extras
        if needed.marker
        and needed.marker.evaluate({"extra": extra})
        and not needed.marker.evaluate({"extra": ""})
    ]
    return all(is_installed(needed) for needed in of_extras)


def constraints(others: Iterable[Any]) -> list[str]:
    """Constraints for pip, which also installs dependencies: the versions of ``others`` and the
    installed torch."""
    _, utils = load_packaging()
    lines = []
    for name in KEPT:
        try:
            lines.append(name + "==" + metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    kept = {line.partition("==")[0] for line in lines}
    bounded = [
        wanted.name + str(wanted.specifier)
        for wanted in others
        if wanted.specifier and utils.canonicalize_name(wanted.name) not in kept
    ]
    return lines + bounded


def install(lines: Sequence[str], folder: Path, *, layer: bool) -> list[str]:
    """Install missing requirements. Returns folders to add to the path; none if the packages were
    installed into this Python."""
    if not lines:
        return []
    requested = parse(lines)
    missing = [wanted for wanted in requested if not is_installed(wanted)]
    if not missing:
        return []
    ensure_pip()
    if not layer:
        run_pip(missing, requested, sys.executable)
        return []
    return [install_layer(missing, requested, folder)]


def install_layer(missing: Sequence[Any], requested: Sequence[Any], folder: Path) -> str:
    """Create a virtual environment with the missing packages on top of this one; shared by jobs."""
    name = "\n".join(sorted(map(str, missing))) + sys.version + sys.prefix
    home = folder / ("site-" + hashlib.sha256(name.encode()).hexdigest()[:16])
    python = home / "bin" / "python"
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            venv.EnvBuilder(clear=True, symlinks=True).create(home)
            parent_paths = [path for path in sys.path if path.endswith("-packages")]
            (site / "parent.pth").write_text("\n".join(parent_paths))
            run_pip(missing, requested, str(python))
            (home / "complete").touch()
    return str(site)


def run_pip(missing: Sequence[Any], requested: Sequence[Any], python: str) -> None:
    log("installing " + ", ".join(map(str, missing)))
    # "--python" is an option of pip itself and precedes the command.
    command = [sys.executable, "-m", "pip", *(["--python", python] * (python != sys.executable))]
    command += ["install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    settings = {"PIP_ROOT_USER_ACTION": "ignore", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        bounds = Path(scratch, "constraints.txt")
        bounds.write_text("\n".join(constraints(w for w in requested if w not in missing)))
        command += ["-c", str(bounds), *map(str, missing)]
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                print(line, end="", file=sys.stderr, flush=True)
            code = process.wait()
        finally:  # SIGTERM arrived
            if process.poll() is None:
                process.terminate()
    if code:
        network = any(sign in line for line in lines for sign in NO_NETWORK)
        reason = [line.strip() for line in lines if line.startswith("ERROR")][:1]
        raise Stop(
            EX_TEMPFAIL if network else EX_CONFIG,
            "pip could not install what the image lacks: "
            + "".join(reason or [f"exit code {code}"])
            + (" (it could not reach the package index)" if network else ""),
        )
    importlib.invalidate_caches()


# --- code -----------------------------------------------------------------------------------------


def code_folder() -> Path:
    """Cache of fetched archives, named by digest, for the next replica on the machine."""
    configured = os.environ.get("DILOCO_CODE_DIR")
    path = Path(configured or f"{tempfile.gettempdir()}/archipelago-code-{os.getuid()}")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    # In /tmp another user can have created the path.
    info = path.stat() if configured else path.lstat()
    is_unsafe = not configured and (not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o022)
    if info.st_uid != os.getuid() or is_unsafe:
        path = Path(tempfile.mkdtemp(prefix="archipelago-code-"))
    return path


def fetch(uri: str, digest: str, folder: Path) -> Path:
    """The verified archive of that digest, from ``folder`` if it is cached."""
    path = folder / f"{digest}.zip"
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
        return path
    key = f"code/{digest}.zip"
    where = f"{uri.rstrip('/')}/{key}"
    data = with_retries(where, lambda: read(uri, key))
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise Stop(EX_CONFIG, f"{where}: expected sha256 {digest}, found {actual}")
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise Stop(EX_CONFIG, f"{where}: expected a zip archive, found {data[:4]!r}")
    partial = path.with_name(f".{digest}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
    return path


def unpacked(path: Path) -> Path:
    """Extract the archive to a folder, which later replicas use: code can read files beside it, and
    Python keeps compiled modules there, unlike those of a zip. Files that something has removed
    from the folder since are extracted again."""
    folder = path.with_suffix("")
    with path.with_suffix(".lock").open("w") as lock, zipfile.ZipFile(path) as archive:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            removed = [name for name in archive.namelist() if not (folder / name).exists()]
            archive.extractall(folder, removed)
        else:
            partial = Path(tempfile.mkdtemp(dir=path.parent))
            archive.extractall(partial)
            partial.rename(folder)
    return folder


def with_retries(where: str, get: Callable[[], bytes]) -> bytes:
    """Retry temporary errors. A denial is permanent unless the run has trained before, because then
    the credential had access."""
    n, has_trained = 0, os.environ.get("DILOCO_RUN_HAS_TRAINED") == "1"
    tries = TRIES_OF_A_RUN if has_trained else TRIES
    while True:
        try:
            return get()
        except FileNotFoundError:
            raise Stop(EX_CONFIG, f"expected the code at {where}, found nothing") from None
        except (ImportError, ValueError) as error:
            raise Stop(EX_CONFIG, f"{where}: {describe(error)}") from None
        except Exception as error:
            name = type(error).__name__
            if name == "NotFoundError":
                raise Stop(EX_CONFIG, f"expected the code at {where}, found nothing") from None
            is_denied = isinstance(error, PermissionError) or "Credentials" in name
            is_denied = is_denied or name in ("UnauthenticatedError", "PermissionDeniedError")
            if is_denied and not has_trained:
                raise Stop(EX_CONFIG, f"{where}: {describe(error)}") from None
            n += 1
            if n == tries:
                raise Stop(EX_TEMPFAIL, f"{where}: {describe(error)}") from None
            log(f"retrying: {where}: {describe(error)}")
            time.sleep(FIRST_PAUSE_S * 2**n)


def describe(error: Exception) -> str:
    text = str(error).split("\n\nDebug source")[0].replace("\n", " ")
    return f"{type(error).__name__}: {text}"


def read(uri: str, key: str) -> bytes:
    parts = urlsplit(uri)
    if parts.scheme in ("", "file", "local"):
        return read_file(unquote(parts.path) if parts.scheme else uri, key)
    if parts.scheme in ("s3", "s3a") and plain_keys() and importlib.util.find_spec("obstore"):
        return read_s3(parts.netloc, "/".join(filter(None, (parts.path.strip("/"), key))))
    import fsspec

    with fsspec.open(f"{uri.rstrip('/')}/{key}", "rb") as file:
        return bounded(file.read(LIMIT_BYTES + 1))


def bounded(data: bytes) -> bytes:
    if len(data) > LIMIT_BYTES:
        raise ValueError(f"expected at most {LIMIT_BYTES} bytes, found more")
    return data


def read_file(root: str, key: str) -> bytes:
    """Read a regular file below the folder ``root``. Other users can write to a shared folder, so
    symbolic links below it are not followed, and a FIFO or a device does not block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    *folders, name = key.split("/")
    opened = [os.open(os.path.realpath(root), flags | os.O_DIRECTORY)]
    try:
        for folder in folders:
            opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        opened.append(os.open(name, flags, dir_fd=opened[-1]))
        if not stat.S_ISREG(os.fstat(opened[-1]).st_mode):
            raise ValueError("expected a regular file, found another kind")
        with os.fdopen(opened.pop(), "rb") as file:
            return bounded(file.read(LIMIT_BYTES + 1))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise ValueError("expected a regular file, found a link or another kind") from None
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def plain_keys() -> bool:
    """Whether the environment holds explicit S3 keys; otherwise s3fs resolves the identity."""
    env = os.environ
    keys = env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY")
    return bool(keys) and not any(n == "AWS_PROFILE" or n.startswith("FSSPEC_S3") for n in env)


def read_s3(bucket: str, key: str) -> bytes:
    """Read by obstore, which imports ten times faster than s3fs."""
    from datetime import timedelta

    import obstore
    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    store = S3Store(
        bucket,
        region=region,
        client_options={"allow_http": endpoint.startswith("http://")},
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=20)},
        **({"endpoint": endpoint} if endpoint else {"virtual_hosted_style_request": True}),
    )
    response = obstore.get(store, key)
    if response.meta["size"] > LIMIT_BYTES:
        raise ValueError(f"expected at most {LIMIT_BYTES} bytes, found {response.meta['size']}")
    return bytes(response.bytes())


# --- main -------------------------------------------------------------------------------------


def main(document: str, entrypoint: str, *args: str) -> NoReturn:
    job = json.loads(document)
    folder = code_folder()
    began = time.monotonic()
    path = install(job["requirements"], folder, layer=job["layer"])
    installed = time.monotonic()
    digests = (job["sha256"], *job["archives"])
    bundle, *archives = [str(unpacked(fetch(job["uri"], digest, folder))) for digest in digests]
    durations = {"install_s": installed - began, "fetch_s": time.monotonic() - installed}
    durations = {name: round(seconds, 3) for name, seconds in durations.items()}
    log(f"requirements {durations['install_s']:.1f} s, code {durations['fetch_s']:.1f} s")
    before = os.environ.get("PYTHONPATH")
    path = [*archives, bundle, *path, *([before] if before else [])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        "DILOCO_BOOTSTRAP": json.dumps(durations),
    }
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execve(sys.executable, [sys.executable, "-m", entrypoint, *args], env)  # noqa: S606


def leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(EX_TERMINATED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)  # process 1 of a container ignores it by default
    try:
        main(*sys.argv[1:])
    except Stop as stop:
        print(f"error: bootstrap: {stop}", file=sys.stderr, flush=True)
        sys.exit(stop.code)
