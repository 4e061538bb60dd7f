"""The API does what its schema says: schemathesis makes up calls, right and wrong ones, and finds
no answer that the schema does not know, no error of ours, and no bad input that was taken.
https://schemathesis.readthedocs.io/

The calls are the same on every run. ``ARCHIPELAGO_TEST_API_EXAMPLES`` asks for more of them. Work
that a call makes without end is found as well: neither the server, which is in this process, nor
schemathesis may take more memory than :data:`MEMORY_BYTES`, and so it is a 500 or a time-out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import seed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]

EXAMPLES = os.environ.get("ARCHIPELAGO_TEST_API_EXAMPLES", "10")

MEMORY_BYTES = 3 * 2**30
"""Of address space, beside what this process has when the test begins."""
MADE_UP = Path(__file__).with_name("made_up_calls.py")

# Kept connections would cost 40 ms a call here: head and body are two packets, and the second waits
# for the first to be acknowledged.
# JSON Schema cannot say that pools add up to the target, or that a run is still working; and what
# is a good document there may name a credential or hardware that nobody has.
# The bounds of what is planned are those of what is submitted, a quarter of all calls.
CONFIG = """
hooks = "{made_up}"
request-timeout = 60
headers = {{ Authorization = "Bearer {token}", Connection = "close" }}
{parameters}
[generation]
deterministic = true
max-examples = {examples}
database = "none"

[[operations]]
include-method = "POST"
[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 422]

[[operations]]
include-path = "/api/plan"
phases.coverage.enabled = false
"""


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    if sys.platform != "linux":  # elsewhere the limit is not kept
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([most, *known]), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def token(run: Any, token_of: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    # Made-up URIs are not asked for: what buckets and backends say is tested elsewhere.
    monkeypatch.setattr("runs.submit.preflight.check_run", lambda *_, **__: [])
    monkeypatch.setattr("runs.submit.preflight.check_new_pool", lambda *_: [])
    # There is no broker, and waiting for it would take most of the time.
    monkeypatch.setattr("runs.task_queue._send", lambda *_: None)
    return str(token_of("root", "admin"))


def findings(url: str, folder: Path, token: str, *options: str, parameters: str = "") -> int:
    """0 when schemathesis has found nothing."""
    config = folder / "schemathesis.toml"
    config.write_text(
        CONFIG.format(token=token, parameters=parameters, examples=EXAMPLES, made_up=MADE_UP)
    )
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run",
        f"{url}/api/openapi.json", "--no-color", "--continue-on-failure", "--warnings", "off",
        "--suppress-health-check", "all", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    said = done.stdout + done.stderr
    assert "Operations:" in said or "Test cases:" in said, said
    print(said)  # shown when there is something
    return done.returncode


def test_calls_about_a_run_there_is(run: Any, token: str, live_server: Any, tmp_path: Path) -> None:
    pool = run.pools.get().pk
    parameters = (
        f'[parameters]\n"path.run_id" = "{run.pk}"\n"path.number" = 1\n"path.attempt" = 1\n'
        f'"path.pool_id" = {pool}\n'
    )
    assert findings(live_server.url, tmp_path, token, parameters=parameters) == 0


def test_calls_about_anything(run: Any, token: str, live_server: Any, tmp_path: Path) -> None:
    seed.run(run.owner, state="succeeded", committed=2, replicas=1)
    # The coverage of bounds is the same as above.
    phases = ("--phases", "fuzzing,stateful")
    assert findings(live_server.url, tmp_path, token, *phases) == 0
