"""The bootstrap on a real interpreter: from a rendezvous to the entrypoint, or an error."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.store.retry import RUN_HAS_TRAINED
from executors.base import CodeRef
from executors.bootstrap import command as bootstrap
from executors.bootstrap import script
from tests.executors.bundles import PROGRAM, bare_environment, code_in, finish, put, run, zipped
from tests.matrix import matrix
from tests.servers import S3Server

pytestmark = pytest.mark.processes

PYTHON = sys.executable


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return bare_environment(tmp_path / "kept")


def test_without_code_the_image_has_the_module() -> None:
    assert bootstrap.command("pkg.mod", ["a"]) == ["python", "-m", "pkg.mod", "a"]
    assert bootstrap.packed_command("pkg.mod", ["a"]) == ["python", "-m", "pkg.mod", "a"]


def test_code_is_fetched_checked_and_run(tmp_path: Path, env: dict[str, str]) -> None:
    code = code_in(tmp_path / "run")
    done = run(code, env | {"REPLICA_RANK": "3", "PYTHONPATH": "/own"}, "a b", "$c", python=PYTHON)
    assert done.returncode == 0, done.stderr
    assert 'ran [["a b", "$c"], "3"]' in done.stdout
    assert f"path {tmp_path / 'kept' / code.sha256}{os.pathsep}/own\n" in done.stdout
    took = json.loads(done.stdout.partition("took ")[2])
    assert set(took) == {"install_s", "fetch_s"} and all(s >= 0 for s in took.values())


def test_the_second_replica_on_a_machine_fetches_nothing(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code = code_in(tmp_path / "run")
    assert run(code, env, python=PYTHON).returncode == 0
    (tmp_path / "run" / "code" / f"{code.sha256}.zip").unlink()
    assert run(code, env, python=PYTHON).returncode == 0
    # a cached archive is verified too
    (tmp_path / "kept" / f"{code.sha256}.zip").write_bytes(b"damaged")
    done = run(code, env, python=PYTHON)
    assert done.returncode == 78 and "found nothing" in done.stderr


def test_later_replicas_use_compiled_modules_and_restore_removed_files(
    tmp_path: Path, env: dict[str, str]
) -> None:
    digest = put(tmp_path / "run", {"bundled.py": "import used", "used.py": "print(__cached__)"})
    code = CodeRef(uri=str(tmp_path / "run"), sha256=digest)
    first = run(code, env, python=PYTHON)
    compiled = Path(first.stdout.splitlines()[-1])
    assert compiled.is_relative_to(tmp_path / "kept" / digest), first.stderr
    before = compiled.stat().st_mtime_ns
    (tmp_path / "kept" / digest / "bundled.py").unlink()
    assert run(code, env, python=PYTHON).stdout.splitlines()[-1] == str(compiled)
    assert compiled.stat().st_mtime_ns == before


def test_user_code_comes_before_the_bundle_and_finds_its_files(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code = code_in(tmp_path / "run")
    mine = (
        "import pathlib, os; print(pathlib.Path(__file__).with_name('data.txt').read_text())\n"
        "import bundled"
    )
    archive = put(tmp_path / "run", {"mine/main.py": mine, "mine/data.txt": "beside"})
    code = CodeRef(uri=code.uri, sha256=code.sha256, archives=(archive,))
    for _ in range(2):  # unpacked once
        done = run(code, env, entrypoint="mine.main", python=PYTHON)
        assert done.returncode == 0, done.stderr
        assert "beside\nran " in done.stdout
    kept = tmp_path / "kept"
    assert f"path {kept / archive}{os.pathsep}{kept / code.sha256}\n" in done.stdout


def test_the_working_directory_is_not_searched(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled.py").write_text("print('not this')")
    done = run(code_in(tmp_path / "run"), env, python=PYTHON)
    assert "ran " in done.stdout and "not this" not in done.stdout


def test_a_damaged_bundle_is_refused_with_expected_and_found(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code = code_in(tmp_path / "run")
    bundle = tmp_path / "run" / "code" / f"{code.sha256}.zip"
    bundle.write_bytes(bundle.read_bytes() + b"x")
    result = hashlib.sha256(bundle.read_bytes()).hexdigest()
    done = run(code, env, python=PYTHON)
    assert done.returncode == 78
    assert f"expected sha256 {code.sha256}, found {result}" in done.stderr
    assert "ran" not in done.stdout and not list((tmp_path / "kept").glob("*.zip"))


def test_a_missing_bundle_is_an_error(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "run").mkdir()
    code = CodeRef(uri=(tmp_path / "run").as_uri(), sha256="a" * 64)
    done = run(code, env, python=PYTHON)
    assert done.returncode == 78
    assert f"expected the code at {code.uri}/code/{'a' * 64}.zip, found nothing" in done.stderr


def test_a_denial_is_an_outage_once_the_run_has_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(script.time, "sleep", pauses.append)
    answers: list[bytes | Exception] = [PermissionError("403")] * 3 + [b"code"]

    def get() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(script.Stop) as stopped:
        script.with_retries("s3://b/code", get)
    assert (stopped.value.code, pauses) == (script.EX_CONFIG, [])
    monkeypatch.setenv(RUN_HAS_TRAINED, "1")
    assert script.with_retries("s3://b/code", get) == b"code"
    answers[:] = [PermissionError("403")] * 20
    with pytest.raises(script.Stop) as stopped:
        script.with_retries("s3://b/code", get)
    assert stopped.value.code == script.EX_TEMPFAIL
    assert sum(pauses) > 60


def test_an_invalid_archive_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    digest = hashlib.sha256(b"#!/bin/sh").hexdigest()
    (tmp_path / "run" / "code").mkdir(parents=True)
    (tmp_path / "run" / "code" / f"{digest}.zip").write_bytes(b"#!/bin/sh")
    done = run(CodeRef(uri=str(tmp_path / "run"), sha256=digest), env, python=PYTHON)
    assert done.returncode == 78 and "expected a zip archive" in done.stderr


def test_an_unsupported_store_is_an_error(env: dict[str, str]) -> None:
    done = run(CodeRef(uri="nosuch://bucket/run", sha256="a" * 64), env, python=PYTHON)
    assert done.returncode == 78 and "nosuch" in done.stderr


@matrix("client", ["obstore", "s3fs"], fast=1)
def test_code_comes_from_a_bucket(
    s3: S3Server, tmp_path: Path, env: dict[str, str], client: str
) -> None:
    import obstore
    from obstore.store import S3Store

    data = zipped({"bundled.py": "import sys, os; print('ran', 'obstore' in sys.modules)"})
    digest = hashlib.sha256(data).hexdigest()
    store = S3Store(
        s3.bucket,
        endpoint=s3.endpoint_url,
        access_key_id=s3.access_key,
        secret_access_key=s3.secret_key,
        client_options={"allow_http": True},
    )
    obstore.put(store, f"runs/{client}/code/{digest}.zip", data)
    code = CodeRef(uri=f"s3://{s3.bucket}/runs/{client}", sha256=digest)
    access = dict(s3.env)
    if client == "s3fs":  # from fsspec's configuration, which obstore does not read
        access = {
            "FSSPEC_S3_KEY": access.pop("AWS_ACCESS_KEY_ID"),
            "FSSPEC_S3_SECRET": access.pop("AWS_SECRET_ACCESS_KEY"),
            **access,
        }
    done = run(code, env | access, python=PYTHON)
    assert done.returncode == 0, done.stderr
    assert "ran False" in done.stdout
    gone = run(CodeRef(uri=code.uri, sha256="b" * 64), env | access, python=PYTHON)
    assert gone.returncode == 78 and "found nothing" in gone.stderr
    wrong = {name: "wrong" if "SECRET" in name else value for name, value in access.items()}
    refused = run(CodeRef(uri=code.uri, sha256="b" * 64), env | wrong, python=PYTHON)
    assert refused.returncode == 78, refused.stderr


def test_an_unreachable_bucket_is_a_temporary_failure(env: dict[str, str]) -> None:
    away = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-value",
    }
    done = run(CodeRef(uri="s3://bucket/run", sha256="a" * 64), env | away, python=PYTHON)
    assert done.returncode == 75
    assert done.stdout.count("retrying") == script.TRIES - 1
    assert "127.0.0.1:1" in done.stderr
    assert "s3cr3t-value" not in done.stderr + done.stdout


def test_signals_reach_the_replica(tmp_path: Path, env: dict[str, str]) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    digest = put(tmp_path / "run", {"bundled.py": program})
    command = bootstrap.command(
        "bundled", python=PYTHON, code=CodeRef(uri=str(tmp_path / "run"), sha256=digest)
    )
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "up\n" for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 7


def test_no_argument_is_longer_than_a_backend_accepts(tmp_path: Path, env: dict[str, str]) -> None:
    code = code_in(tmp_path / "run")
    args = ["x" * 700, "'\"\\ $(HOME) ü"]
    command = bootstrap.packed_command("bundled", args, python=PYTHON, code=code)
    assert max(map(len, command[1:])) <= 256
    assert len(command) < 50
    assert all(re.fullmatch(r"[A-Za-z0-9+/=]+", part) for part in command[3:])
    done = finish(command, env | {"REPLICA_RANK": "1"})
    assert done.returncode == 0, done.stderr
    assert f"ran {json.dumps([args, '1'])}" in done.stdout


def test_long_arguments_are_packed_without_code_too(env: dict[str, str]) -> None:
    args = ["args", "x" * 700, "ü"]
    command = bootstrap.packed_command("replica_stub", args, python=PYTHON)
    assert max(map(len, command[1:])) <= 256
    done = finish(command, env | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert json.loads(done.stdout) == args[1:]


def test_an_old_python_is_refused_with_the_required_version() -> None:
    ast.parse(bootstrap._LOADER, feature_version=(3, 4))
    older = f"import sys; sys.version_info = (3, 10, 1); exec({bootstrap._LOADER!r})"
    done = finish([PYTHON, "-c", older], {})
    assert done.returncode == 78
    assert "expected Python 3.11 or newer, found" in done.stdout


def test_a_folder_that_is_another_users_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_CODE_DIR", str(tmp_path))
    assert script.code_folder() == tmp_path
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    own = script.code_folder()
    assert own != tmp_path
    own.rmdir()


def test_a_folder_in_tmp_that_others_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DILOCO_CODE_DIR", raising=False)
    monkeypatch.setattr(script.tempfile, "tempdir", str(tmp_path))
    wanted = tmp_path / f"archipelago-code-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    wanted.symlink_to(tmp_path / "elsewhere")
    assert script.code_folder() != wanted
    wanted.unlink()
    wanted.mkdir()
    wanted.chmod(0o777)
    assert script.code_folder() != wanted
    wanted.chmod(0o700)
    assert script.code_folder() == wanted


def test_code_is_read_without_following_links_in_a_shared_folder(tmp_path: Path) -> None:
    digest = put(tmp_path / "elsewhere", {"bundled.py": PROGRAM})
    key = f"code/{digest}.zip"
    as_link, as_folder = tmp_path / "as-link", tmp_path / "as-folder"
    (as_link / "code").mkdir(parents=True)
    (as_link / key).symlink_to(tmp_path / "elsewhere" / key)
    as_folder.mkdir()
    (as_folder / "code").symlink_to(tmp_path / "elsewhere" / "code")
    for run_folder in (as_link, as_folder):
        with pytest.raises(ValueError, match="expected a regular file"):
            script.read(run_folder.as_uri(), key)
    root = tmp_path / "root"  # the rendezvous itself can be a link that an administrator made
    root.symlink_to(tmp_path / "elsewhere")
    assert script.read(root.as_uri(), key) == (tmp_path / "elsewhere" / key).read_bytes()
    assert script.read(str(root), key)


def test_code_that_is_a_pipe_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    os.mkfifo(tmp_path / "code" / "pipe.zip")
    with pytest.raises(ValueError, match="expected a regular file"):
        script.read(tmp_path.as_uri(), "code/pipe.zip")
    with (tmp_path / "code" / "sparse.zip").open("wb") as file:
        file.truncate(script.LIMIT_BYTES * 100)
    with pytest.raises(ValueError, match="expected at most"):
        script.read(tmp_path.as_uri(), "code/sparse.zip")


def test_a_link_in_place_of_the_code_ends_the_job_for_good(
    tmp_path: Path, env: dict[str, str]
) -> None:
    code = code_in(tmp_path / "run")
    bundle = tmp_path / "run" / "code" / f"{code.sha256}.zip"
    bundle.rename(tmp_path / "moved.zip")
    bundle.symlink_to(tmp_path / "moved.zip")
    done = run(code, env, python=PYTHON)
    assert done.returncode == 78
    assert "expected a regular file" in done.stderr
