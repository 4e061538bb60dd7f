"""The API conforms to its schema. schemathesis generates valid and invalid requests and reports
responses that are not in the schema, server errors, and invalid input that is accepted.
https://schemathesis.readthedocs.io/

The requests are deterministic. ``ARCHIPELAGO_TEST_API_EXAMPLES`` increases their number. Unbounded
work is detected too: neither the server, which runs in this process, nor schemathesis can use more
than :data:`MEMORY_BYTES`, so such a request ends with a 500 or a time-out.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import seed

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.processes,
    pytest.mark.slow(minutes=4),
]

EXAMPLES = os.environ.get("ARCHIPELAGO_TEST_API_EXAMPLES", "4")

MEMORY_BYTES = 3 * 2**30
"""Address space in addition to what this process uses when the test starts."""
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")

# Keep-alive would cost 40 ms per request here: head and body are two packets, and the second waits
# for the acknowledgement of the first.
# JSON Schema cannot express that pools add up to the target, or that a run is active; a valid
# document can also refer to an unknown credential or hardware.
# A document of a sweep contains that of a run. Its bounds make up most requests: send them once.
CONFIG = """
hooks = "{hooks}"
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

# Names, users and other budgets are not in the schema.
[[operations]]
include-method = "PUT"
[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 422]

# A period that is too long, in the future, or ends before it begins.
[[operations]]
include-path = "/api/spend"
[operations.checks.positive_data_acceptance]
expected-statuses = ["2xx", 422]

[[operations]]
include-name = ["POST /api/runs", "POST /api/plan", "POST /api/sweeps/plan"]
phases.coverage.enabled = false
"""


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    if sys.platform != "linux":  # other systems do not enforce the limit
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
    # Generated URIs are not opened: other tests cover buckets and backends.
    monkeypatch.setattr(
        "runs.submit.preflight.check_runs", lambda drafts, **_: [[] for _ in drafts]
    )
    monkeypatch.setattr("runs.submit.preflight.check_new_pool", lambda *_: [])
    # Without a broker: waiting for it would take most of the time.
    monkeypatch.setattr("runs.task_queue._send", lambda *_: None)
    return str(token_of("root", "admin", "read", "operate", "admin"))


def findings(url: str, folder: Path, token: str, *options: str, parameters: str = "") -> int:
    """Exit status of schemathesis: 0 without findings."""
    # schemathesis waits 10 s for the schema, which is too short on a busy machine.
    schema = folder / "openapi.json"
    urllib.request.urlretrieve(f"{url}/api/openapi.json", schema)
    config = folder / "schemathesis.toml"
    config.write_text(
        CONFIG.format(token=token, parameters=parameters, examples=EXAMPLES, hooks=HOOKS)
    )
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        str(config),
        "run",
        str(schema),
        f"--url={url}",
        "--no-color",
        "--continue-on-failure",
        "--warnings",
        "off",
        "--suppress-health-check",
        "all",
        # One would revoke the token of all other requests, one needs the session of a page.
        "--exclude-operation-id",
        "dashboard_api_people_revoke_token",
        "--exclude-operation-id",
        "dashboard_api_people_create_token",
        *options,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=2000)
    output = done.stdout + done.stderr
    assert "Operations:" in output or "Test cases:" in output, output
    print(output)  # pytest shows it on failure
    return done.returncode


def test_requests_about_an_existing_run(
    run: Any, token: str, live_server: Any, tmp_path: Path
) -> None:
    pool = run.pools.get().pk
    parameters = (
        f'[parameters]\n"path.run_id" = "{run.pk}"\n"path.number" = 1\n"path.attempt" = 1\n'
        f'"path.pool_id" = {pool}\n'
    )
    assert findings(live_server.url, tmp_path, token, parameters=parameters) == 0


def test_requests_with_arbitrary_parameters(
    run: Any, token: str, live_server: Any, tmp_path: Path
) -> None:
    seed.run(run.owner, state="succeeded", committed=2, replicas=1)
    # The coverage of bounds is the same as above.
    phases = ("--phases", "fuzzing,stateful")
    assert findings(live_server.url, tmp_path, token, *phases) == 0
