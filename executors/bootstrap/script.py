"""What a job on a bare image runs first: shipped as text by :mod:`executors.bootstrap.command`.

``sys.argv``: this text's name, a JSON document (uri, sha256, archives, requirements, layer), the
entrypoint, its arguments. It installs the requirements that are missing, fetches the code, checks
its digest, and becomes ``python -m ENTRYPOINT ARGS``, so that signals reach the replica.

Only the standard library; what it needs besides (packaging, pip, obstore, fsspec) it looks for when
it needs it. Ends with 75 where another try can help (a network), 78 where it cannot, 143 when it
was asked to end.
"""

# No __future__ imports: its arguments may stand before it (see executors.bootstrap.command).
import errno
import fcntl
import hashlib
import importlib
import importlib.util
import io
import json
import os
import shutil
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
"""A larger object is no archive of code: it is not read into memory."""

KEPT = ("torch", "torchvision", "torchaudio")
"""An image's own build is kept, whatever its version: it is made for the image's GPU."""

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
"""How pip says that it could not reach an index; what it says last is then that nothing matches."""


class Stop(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    print("bootstrap: " + text, flush=True)


# --- requirements ---------------------------------------------------------------------------------


def load_packaging() -> tuple[Any, Any]:
    """The modules requirements and utils of packaging: its own, or pip's copy."""
    if not any(importlib.util.find_spec(name) for name in ("packaging", "pip")):
        ensure_pip()
    own = importlib.util.find_spec("packaging")
    home = "packaging" if own else "pip._vendor.packaging"
    return importlib.import_module(f"{home}.requirements"), importlib.import_module(f"{home}.utils")


def ensure_pip() -> None:
    if importlib.util.find_spec("pip"):
        return
    done = subprocess.run([sys.executable, "-m", "ensurepip"], capture_output=True, text=True)
    importlib.invalidate_caches()
    if done.returncode or not importlib.util.find_spec("pip"):
        raise Stop(EX_CONFIG, "expected pip in " + sys.executable + ", found none: " + done.stderr)


def parse(lines: Iterable[str]) -> list[Any]:
    requirements, _ = load_packaging()
    found = []
    for line in lines:
        try:
            wanted = requirements.Requirement(line)
        except requirements.InvalidRequirement as error:
            raise Stop(EX_CONFIG, f"expected a requirement, found {line!r}: {error}") from None
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            found.append(wanted)
    return found


def is_there(wanted: Any) -> bool:
    """Whether this Python has what the requirement asks for, its extras included."""
    requirements, utils = load_packaging()
    if utils.canonicalize_name(wanted.name) in KEPT and importlib.util.find_spec(wanted.name):
        return True
    try:
        here = metadata.distribution(wanted.name)
    except metadata.PackageNotFoundError:
        return False
    if wanted.url:
        return bool(wanted.url == json.loads(here.read_text("direct_url.json") or "{}").get("url"))
    if not wanted.specifier.contains(here.version, prereleases=True):
        return False
    of_extras = [
        needed
        for needed in map(requirements.Requirement, here.requires or ())
        for extra in wanted.extras
        if needed.marker and needed.marker.evaluate({"extra": extra})
        and not needed.marker.evaluate({"extra": ""})
    ]  # fmt: skip
    return all(is_there(needed) for needed in of_extras)


def constraints(others: Iterable[Any]) -> list[str]:
    """Lines that keep pip, which also installs what the missing needs, to the versions asked of
    ``others`` and to the torch that is there."""
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
    """Folders to put on the path: none where the packages went into this Python itself."""
    if not lines:
        return []
    asked = parse(lines)
    missing = [wanted for wanted in asked if not is_there(wanted)]
    if not missing:
        return []
    ensure_pip()
    if not layer:
        run_pip(missing, asked, sys.executable)
        return []
    return [install_layer(missing, asked, folder)]


def install_layer(missing: Sequence[Any], asked: Sequence[Any], folder: Path) -> str:
    """A virtual environment that sees this one, for what it lacks; made once and shared."""
    name = "\n".join(sorted(map(str, missing))) + sys.version + sys.prefix
    home = folder / ("site-" + hashlib.sha256(name.encode()).hexdigest()[:16])
    python = home / "bin" / "python"
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            venv.EnvBuilder(clear=True, symlinks=True).create(home)
            seen = [path for path in sys.path if path.endswith("-packages")]
            (site / "parent.pth").write_text("\n".join(seen))
            run_pip(missing, asked, str(python))
            (home / "complete").touch()
    return str(site)


def run_pip(missing: Sequence[Any], asked: Sequence[Any], python: str) -> None:
    say("installing " + ", ".join(map(str, missing)))
    # "--python" is of pip itself, and comes before the command.
    command = [sys.executable, "-m", "pip", *(["--python", python] * (python != sys.executable))]
    command += ["install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    quietly = {"PIP_ROOT_USER_ACTION": "ignore", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        bounds = Path(scratch, "constraints.txt")
        bounds.write_text("\n".join(constraints(w for w in asked if w not in missing)))
        command += ["-c", str(bounds), *map(str, missing)]
        process = subprocess.Popen(
            command, env={**os.environ, **quietly}, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        said_lines = []
        try:
            for line in process.stderr:
                said_lines.append(line)
                print(line, end="", file=sys.stderr, flush=True)
            code = process.wait()
        finally:  # asked to end meanwhile
            if process.poll() is None:
                process.terminate()
    if code:
        network = any(sign in line for line in said_lines for sign in NO_NETWORK)
        reason = [line.strip() for line in said_lines if line.startswith("ERROR")][:1]
        raise Stop(
            EX_TEMPFAIL if network else EX_CONFIG,
            "pip could not install what the image lacks: "
            + "".join(reason or [f"exit code {code}"])
            + (" (it could not reach the package index)" if network else ""),
        )
    importlib.invalidate_caches()


# --- code -----------------------------------------------------------------------------------------


def code_folder() -> Path:
    """Where what was fetched is kept, named by its digest, for the next replica on the machine."""
    given = os.environ.get("DILOCO_CODE_DIR")
    path = Path(given or f"{tempfile.gettempdir()}/archipelago-code-{os.getuid()}")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.stat() if given else path.lstat()  # in /tmp others can have put a link or folder
    theirs = not given and (not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022)
    if found.st_uid != os.getuid() or theirs:
        path = Path(tempfile.mkdtemp(prefix="archipelago-code-"))
    return path


def fetch(uri: str, digest: str, folder: Path) -> Path:
    """The archive of that digest, checked; from ``folder`` if it is there."""
    path = folder / f"{digest}.zip"
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
        return path
    key = f"code/{digest}.zip"
    where = f"{uri.rstrip('/')}/{key}"
    data = patiently(where, lambda: read(uri, key))
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise Stop(EX_CONFIG, f"{where}: expected sha256 {digest}, found {found}")
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise Stop(EX_CONFIG, f"{where}: expected a zip archive, found {data[:4]!r}")
    made = path.with_name(f".{digest}.{os.getpid()}")
    made.write_bytes(data)
    made.replace(path)
    return path


def unpacked(path: Path) -> Path:
    """A folder with what the archive holds: user code may read files that lie beside it."""
    folder = path.with_suffix("")
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=path.parent))
        with zipfile.ZipFile(path) as archive:
            archive.extractall(made)
        try:
            made.rename(folder)
        except OSError:  # another replica was first
            shutil.rmtree(made)
    return folder


def patiently(where: str, get: Callable[[], bytes]) -> bytes:
    """Try again where that can help. A denial is final, unless the run has trained before: then the
    credential was permitted to read, and will be again."""
    n, has_trained = 0, os.environ.get("DILOCO_RUN_HAS_TRAINED") == "1"
    tries = TRIES_OF_A_RUN if has_trained else TRIES
    while True:
        try:
            return get()
        except FileNotFoundError:
            raise Stop(EX_CONFIG, f"expected the code at {where}, found nothing") from None
        except (ImportError, ValueError) as error:
            raise Stop(EX_CONFIG, f"{where}: {said(error)}") from None
        except Exception as error:
            name = type(error).__name__
            if name == "NotFoundError":
                raise Stop(EX_CONFIG, f"expected the code at {where}, found nothing") from None
            is_denied = isinstance(error, PermissionError) or "Credentials" in name
            is_denied = is_denied or name in ("UnauthenticatedError", "PermissionDeniedError")
            if is_denied and not has_trained:
                raise Stop(EX_CONFIG, f"{where}: {said(error)}") from None
            n += 1
            if n == tries:
                raise Stop(EX_TEMPFAIL, f"{where}: {said(error)}") from None
            say(f"trying again: {where}: {said(error)}")
            time.sleep(FIRST_PAUSE_S * 2**n)


def said(error: Exception) -> str:
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
    """A regular file below the folder ``root``. Others can write to a shared folder: below it no
    symbolic link is followed, and a FIFO or a device is not opened to wait for it."""
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
    """Whether the environment says all about who we are to S3: else s3fs finds out."""
    env = os.environ
    given = env.get("AWS_ACCESS_KEY_ID") and env.get("AWS_SECRET_ACCESS_KEY")
    return bool(given) and not any(n == "AWS_PROFILE" or n.startswith("FSSPEC_S3") for n in env)


def read_s3(bucket: str, key: str) -> bytes:
    """By obstore, which is imported in a tenth of the time s3fs takes."""
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
    found = obstore.get(store, key)
    if found.meta["size"] > LIMIT_BYTES:
        raise ValueError(f"expected at most {LIMIT_BYTES} bytes, found {found.meta['size']}")
    return bytes(found.bytes())


# --- the whole ------------------------------------------------------------------------------------


def main(document: str, entrypoint: str, *args: str) -> NoReturn:
    job = json.loads(document)
    folder = code_folder()
    began = time.monotonic()
    path = install(job["requirements"], folder, layer=job["layer"])
    installed = time.monotonic()
    bundle = fetch(job["uri"], job["sha256"], folder)
    archives = [unpacked(fetch(job["uri"], digest, folder)) for digest in job["archives"]]
    took = {"install_s": installed - began, "fetch_s": time.monotonic() - installed}
    took = {name: round(seconds, 3) for name, seconds in took.items()}
    say(f"requirements {took['install_s']:.1f} s, code {took['fetch_s']:.1f} s")
    before = os.environ.get("PYTHONPATH")
    path = [*map(str, archives), str(bundle), *path, *([before] if before else [])]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        "DILOCO_BOOTSTRAP": json.dumps(took),
    }
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execve(sys.executable, [sys.executable, "-m", entrypoint, *args], env)  # noqa: S606


def leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(EX_TERMINATED)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)  # as process 1 of a container it would not end otherwise
    try:
        main(*sys.argv[1:])
    except Stop as stop:
        print(f"error: bootstrap: {stop}", file=sys.stderr, flush=True)
        sys.exit(stop.code)
