"""A run trains on five backends with credentials from the admin, survives a preemption, and leaves
no secret.

The server's environment has no credentials, and jobs get keys for the prefix of the run only. Four
of the backends are emulated by :mod:`tests.emulators`, which start real processes and are called by
the real SDKs; the rendezvous is a bucket on a real S3 server. The test searches every file of the
state folder (database, logs, broker, jobs), every table, every object of the bucket, the arguments
of every process, and pages.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import psutil
import pytest

from diloco.store.open import open_store
from tests.e2e.lives import POLL_S, look, wait_for, wait_for_ingest
from tests.emulators.compose import BACKENDS, Together, running_together
from tests.emulators.s3 import ROLE_ARN
from tests.servers import wait_until
from tests.stack import PASSWORD, LiveStack, running_stack

pytestmark = [pytest.mark.processes, pytest.mark.slow(minutes=3)]

SECRET_NAMES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ENDPOINT_URL",
    "AWS_DEFAULT_REGION",
    "MODAL_TOKEN_ID",
    "MODAL_TOKEN_SECRET",
    "HF_TOKEN",
    "KUBECONFIG",
)
HARDWARE = {
    "local": "cpu",
    "modal": "cpu",
    "huggingface": "cpu-basic",
    "sagemaker": "ml.m5.large",
    "kubernetes": "cpu",
}

_CREATE = """
import json, secrets
from django.contrib.auth.models import User
from diloco.protocol.settings import GroupSettings
from diloco.protocol.workload import ByteGPTWorkload
from runs.models import Credential
from runs.submit.run_draft import PoolDraft, RunDraft
from runs.submit.create import create_run
by_name = dict(Credential.objects.values_list("name", "pk"))
draft = RunDraft(
    name="five credentials",
    settings=GroupSettings(
        num_replicas=5, min_quorum=2, start_replicas=5, total_rounds=9999, sync_every=3,
        warmup_steps=0, batch_size=2, heartbeat_timeout_s=6.0, round_timeout_s=120.0,
        start_wait_s=60.0, checkpoint_every=10,
    ),
    workload=ByteGPTWorkload(size="demo", data="stdlib", eval_bytes=4096),
    pools=tuple(
        PoolDraft(backend=b, hardware=h, credential=by_name.get(b)) for b, h in {hardware!r}.items()
    ),
    rendezvous={rendezvous!r}, store_credential=by_name["store-s3"],
)
print(create_run(draft, owner=User.objects.get(username="operator"),
                 submit_key=secrets.token_hex()).pk)
"""

_TABLES = """
from django.db import connection
with connection.cursor() as cursor:
    for table in connection.introspection.table_names(cursor):
        cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
        names = [column[0] for column in cursor.description]
        for row in cursor.fetchall():
            values = {n: bytes(v) if isinstance(v, memoryview) else v for n, v in zip(names, row)}
            if table == "runs_credential":
                del values["sealed"]
            print(table, values)
"""


class Browser:
    """An HTTP client with the session of an administrator."""

    def __init__(self, url: str) -> None:
        self.url = url
        jar = urllib.request.HTTPCookieProcessor(CookieJar())
        self._opener = urllib.request.build_opener(jar)
        self.post("login", username="admin", password=PASSWORD)

    def get(self, path: str) -> str:
        return str(self._opener.open(f"{self.url}{path}", timeout=600).read().decode())

    def post(self, path: str, **fields: str) -> str:
        """Post ``fields`` to ``path`` with the CSRF token of the form at ``at`` (or ``path``)."""
        form = fields.pop("at", path)
        [token, *_] = re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', self.get(form))
        body = urllib.parse.urlencode({**fields, "csrfmiddlewaretoken": token}).encode()
        with self._opener.open(f"{self.url}{path}", body, timeout=600) as response:
            return str(response.read().decode())


@pytest.fixture(scope="module")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in SECRET_NAMES:
            patch.delenv(name, raising=False)
        with running_together(tmp_path_factory.mktemp("islands")) as islands:
            yield islands


@pytest.fixture(scope="module")
def stack(
    islands: Together, tmp_path_factory: pytest.TempPathFactory, own_database: None
) -> Iterator[LiveStack]:
    env = {name: value for name, value in islands.env.items() if name not in SECRET_NAMES}
    with running_stack(tmp_path_factory.mktemp("var"), **env) as stack:
        yield stack


def credential_fields(islands: Together) -> dict[str, dict[str, str]]:
    """Return the form fields of a credential of each kind."""
    token_id, token_secret = islands.modal.token
    keys = {
        "variable_AWS_ACCESS_KEY_ID": islands.s3.access_key,
        "variable_AWS_SECRET_ACCESS_KEY": islands.s3.secret_key,
        "variable_AWS_REGION": "us-east-1",
    }
    return {
        "modal": {
            "variable_MODAL_TOKEN_ID": token_id,
            "variable_MODAL_TOKEN_SECRET": token_secret,
        },
        "huggingface": {"variable_HF_TOKEN": islands.env["HF_TOKEN"]},
        "sagemaker": keys,
        "kubernetes": {"variable_KUBECONFIG": (islands.state / "kubeconfig").read_text()},
        "store-s3": {
            **keys,
            "variable_AWS_ENDPOINT_URL": islands.s3.endpoint_url,
            "option_assume_role_arn": ROLE_ARN,
            "option_max_session_s": "7200",
            "option_test_uri": f"s3://{islands.s3.bucket}/tested/here",
        },
    }


def secrets_of(islands: Together) -> set[str]:
    kubeconfig = json.loads((islands.state / "kubeconfig").read_text())
    return {
        islands.s3.secret_key,
        islands.env["HF_TOKEN"],
        *islands.modal.token,
        *(user["user"]["token"] for user in kubeconfig["users"]),
    }


def page_of_test(admin: Browser, pk: int) -> str:
    """Test a credential and return its page; again while a busy machine gives no answer in time."""
    for _ in range(10):
        page = admin.post(
            f"admin/runs/credential/{pk}/test/", at=f"admin/runs/credential/{pk}/change/"
        )
        if "no answer within" not in page and "still loading" not in page:
            break
    return page


def test_a_run_on_five_backends_survives_a_preemption_and_leaves_no_secret(
    islands: Together, stack: LiveStack
) -> None:
    admin = Browser(stack.url)
    for kind, fields in credential_fields(islands).items():
        admin.post(f"admin/runs/credential/add/?kind={kind}", name=kind, **fields)
    pks = json.loads(
        stack.python(
            "import json; from runs.models import Credential\n"
            "print(json.dumps(dict(Credential.objects.values_list('name', 'pk'))))"
        )
    )
    assert set(pks) == set(credential_fields(islands))
    for name, pk in pks.items():
        page = page_of_test(admin, pk)
        assert "UTC: works." in page, (name, re.findall(r"UTC: .*", page))
    assert "whose keys open no other prefix" in admin.get(
        f"admin/runs/credential/{pks['store-s3']}/change/"
    )

    rendezvous = f"s3://{islands.s3.bucket}/runs/with-credentials"
    code = _CREATE.replace("{hardware!r}", repr(HARDWARE))
    run = stack.python(code.replace("{rendezvous!r}", repr(rendezvous)))
    wait_for(stack, run, lambda seen: all_contributed(stack, run))
    secrets = secrets_of(islands) | session_keys(islands)
    arguments = assert_not_in_arguments(secrets)
    assert any("diloco.replica" in line for line in arguments)
    pages = [admin.get(path) for path in paths(run, pks)]

    lost = list(HARDWARE).index("kubernetes")
    islands.kubernetes.preempt(f"{run.replace('-', '')[:12]}-{lost}-1")
    wait_for(stack, run, lambda seen: is_included(stack, run, lost, attempt=2))

    # A backend that refuses: its message is stored.
    admin.post(
        f"admin/runs/credential/{pks['modal']}/change/",
        name="modal",
        variable_MODAL_TOKEN_SECRET="as-wrong-and-secret",
    )
    refused = page_of_test(admin, pks["modal"])
    assert "UTC: does not work." in refused
    admin.post(
        f"admin/runs/credential/{pks['modal']}/change/",
        name="modal",
        variable_MODAL_TOKEN_SECRET=islands.modal.token[1],
    )
    secrets.add("as-wrong-and-secret")

    stack.python(
        "from runs.models import Run; from runs.actions.replicas_and_pools import request_stop\n"
        f"request_stop(Run.objects.get(pk={run!r}), actor=None, reason='test is done')"
    )

    def has_ended() -> bool:
        seen = look(stack, run)
        return seen["state"] == "cancelled" and all(a["cause"] for a in seen["attempts"])

    wait_until(has_ended, f"the end of run {run}", every_s=POLL_S)
    wait_for_ingest(stack, run)
    seen = look(stack, run)
    assert_survived(seen, lost="kubernetes")
    for backend in BACKENDS:
        assert all(job.state == "ended" for job in islands.processes(backend).all()), backend
    pages += [refused, *(admin.get(path) for path in paths(run, pks))]
    assert_not_in_text(secrets, "pages", "\n".join(pages))
    assert_not_in_text(secrets, "tables", stack.python(_TABLES))
    assert_not_in_text(secrets, "handles", json.dumps(seen))
    commands = [" ".join(job.command) for b in BACKENDS for job in islands.processes(b).all()]
    assert_not_in_text(secrets, "commands of jobs", "\n".join(commands))
    assert_not_in_bucket(secrets, islands, rendezvous)
    assert_not_in_files(secrets, stack.var)


def all_contributed(stack: LiveStack, run: str) -> bool:
    replicas = stack.python(
        "from runs.models import Contribution\n"
        f"rows = Contribution.objects.filter(round__run={run!r}, state='included')\n"
        "print(*sorted(set(rows.values_list('replica__number', flat=True))))"
    )
    return len(replicas.split()) == len(HARDWARE)


def is_included(stack: LiveStack, run: str, number: int, *, attempt: int) -> bool:
    """Return whether a round includes this attempt; incarnations start with its number."""
    output = stack.python(
        "from runs.models import Contribution\n"
        f"print(Contribution.objects.filter(round__run={run!r}, state='included',"
        f" replica__number={number}, incarnation__startswith='{attempt:05d}-').count())"
    )
    return int(output) > 0


def assert_survived(seen: dict[str, Any], *, lost: str) -> None:
    """The preempted replica was replaced, no round was lost, and all attempts have a price."""
    attempts = {(a["replica__pool__backend"], a["launch_key"][-1]): a for a in seen["attempts"]}
    assert set(attempts) == {(backend, "1") for backend in HARDWARE} | {(lost, "2")}
    assert attempts[lost, "1"]["cause"] == "preempted"
    assert seen["restarts"] == [0] * len(HARDWARE), "a preemption does not count as a failure"
    *rounds, _ = [state for _, state, _ in seen["contributions"]]  # the stop ends the last early
    assert set(rounds) == {"committed"}
    assert "at round" in seen["reason"]
    priced = [a["cost_usd"] for a in seen["attempts"] if a["cost_usd"] is not None]
    assert seen["cost_usd"] == pytest.approx(sum(priced))
    assert seen["cost_usd"] > 0


def session_keys(islands: Together) -> set[str]:
    """Return the session keys of the jobs, which differ. SageMaker jobs fetch theirs at start."""
    keys_by_backend = {}
    for backend in ("modal", "huggingface", "kubernetes"):
        [job] = islands.processes(backend).all()
        assert job.env["AWS_SECRET_ACCESS_KEY"] != islands.s3.secret_key
        keys_by_backend[backend] = {job.env["AWS_SECRET_ACCESS_KEY"], job.env["AWS_SESSION_TOKEN"]}
    keys = set.union(*keys_by_backend.values())
    assert len(keys) == 2 * len(keys_by_backend)
    return keys


def paths(run: str, pks: dict[str, int]) -> list[str]:
    return [
        "",
        f"runs/{run}/",
        f"runs/{run}/snapshot.json",
        "runs/new",
        *(f"runs/{run}/replicas/{number}/" for number in range(len(HARDWARE))),
        *(f"admin/runs/{table}/" for table in ("run", "replicaattempt", "event", "credential")),
        *(f"admin/runs/credential/{pk}/{page}/" for pk in pks.values() for page in PAGES),
    ]


PAGES = ("change", "history", "delete")


def assert_not_in_text(secrets: set[str], where: str, text: str) -> None:
    assert len(text) > 100, where
    for secret in secrets:
        at = text.find(secret)
        assert at < 0, f"{secret} in {where}: …{text[max(0, at - 100) : at + 50]}…"


def assert_not_in_arguments(secrets: set[str]) -> list[str]:
    lines = []
    for process in psutil.Process().children(recursive=True):
        try:
            lines.append("\0".join(process.cmdline()))
        except psutil.Error:
            continue
    assert_not_in_text(secrets, "arguments of processes", "\n".join(lines))
    return lines


def assert_not_in_bucket(secrets: set[str], islands: Together, rendezvous: str) -> None:
    store = open_store(rendezvous, environment=islands.s3.env)
    keys = [info.key for info in store.list("")]
    assert "group.json" in keys
    assert len(keys) > 50
    for key in keys:
        data = store.get(key)
        for secret in secrets:
            assert secret.encode() not in data, f"{secret} in {key}"


def assert_not_in_files(secrets: set[str], folder: Path) -> None:
    """Search all files, among them the worker log, the broker file and logs of local jobs."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_socket()]
    names = {path.relative_to(folder).as_posix() for path in files}
    assert {"logs/worker.log", "logs/web.log", "credentials_key"} <= names
    assert any(name.startswith("jobs/") and name.endswith("/log") for name in names)
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # the server replaces and removes files
            data = path.read_bytes()
            for secret in secrets:
                assert secret.encode() not in data, f"{secret} in {path.relative_to(folder)}"
