"""Secrets of every kind are entered, used by a run, and repeated by backends and errors; no stored
or displayed text contains them.

Backends are fakes that record their input. ``tests/e2e/test_secrets_on_backends.py`` does the same
with real jobs on emulated backends, and also searches files and the arguments of processes.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.views.debug import ExceptionReporter, get_exception_reporter_class

from diloco.store import credentials as store_access
from diloco.store.open import open_store
from executors.base import AccountError, Cause, ExecutorConfig
from runs import redaction
from runs.credentials import open_credential, replica_secrets
from runs.credentials.kinds import KINDS
from runs.models import Credential, Run
from runs.reconcile.launch import launch_replica, launch_run
from runs.reconcile.reconciler import reconcile_run
from runs.submit.run_draft import PoolDraft
from tests.runs import run_harness as w

pytestmark = pytest.mark.django_db

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: isles
contexts: [{name: isles, context: {cluster: isles, user: us}}]
clusters: [{name: isles, cluster: {server: "https://cluster.example:6443"}}]
users: [{name: us, user: {token: canary-of-the-cluster}}]
"""
GOOGLE = {
    "type": "service_account",
    "client_email": "a@b",
    "private_key": "canary-of-google\nline",
}
TYPED: dict[str, dict[str, str]] = {
    "modal": {"MODAL_TOKEN_ID": "ak-canary-modal", "MODAL_TOKEN_SECRET": "as-canary-modal"},
    "huggingface": {"HF_TOKEN": "hf_canary_jobs"},
    "sagemaker": {
        "AWS_ACCESS_KEY_ID": "AKIACANARYSAGEMAKER",
        "AWS_SECRET_ACCESS_KEY": "canary/of+sagemaker",
        "AWS_SESSION_TOKEN": "canary-session-of-sagemaker==",
    },
    "kubernetes": {"KUBECONFIG": KUBECONFIG},
    "store-gs": {"FSSPEC_GS": json.dumps(GOOGLE)},
    "store-az": {
        "AZURE_STORAGE_CONNECTION_STRING": "AccountName=isles;AccountKey=canaryofazure==;X=y"
    },
    "store-hf": {"HF_TOKEN": "hf_canary_store"},
}
CANARIES = (
    "ak-canary-modal",
    "as-canary-modal",
    "hf_canary_jobs",
    "AKIACANARYSAGEMAKER",
    "canary/of+sagemaker",
    "canary-session-of-sagemaker==",
    "canary-of-the-cluster",
    "canary-of-google",
    "canaryofazure==",
    "hf_canary_store",
    "test-secret",
)
"""``test-secret`` is the real one of the tests' S3 server."""
HARDWARE = {
    "local": "cpu",
    "modal": "cpu",
    "huggingface": "cpu-basic",
    "sagemaker": "ml.m5.large",
    "kubernetes": "cpu",
}


@dataclass
class Isles:
    """An administrator, credentials of all kinds, and backends that repeat their input."""

    ada: Client
    backend: Backend
    configs: list[ExecutorConfig]
    credentials: dict[str, Credential]


class Backend(w.FakeExecutor):
    """Quotes its credentials in every message."""

    config = ExecutorConfig()

    def check(self) -> str:
        raise AccountError(f"401: cannot use {dict(self.config.credentials)}")


@pytest.fixture
def isles(monkeypatch: pytest.MonkeyPatch, s3: Any, outbox: Any) -> Isles:
    from runs.backends import executors

    ada = Client()
    ada.force_login(w.person("ada", "admin"))
    typed = {
        **TYPED,
        "store-s3": {
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "AWS_ENDPOINT_URL": s3.endpoint_url,
        },
    }
    assert set(typed) == set(KINDS)
    for kind, values in typed.items():
        data = {f"variable_{name}": value for name, value in values.items()}
        response = ada.post(f"/admin/runs/credential/add/?kind={kind}", {"name": kind, **data})
        assert response.status_code == 302, response.context["adminform"].form.errors
    backend, configs = Backend(), []

    def get(name: str, config: ExecutorConfig) -> Backend:
        configs.append(config)
        backend.config = config
        return backend

    monkeypatch.setattr(executors, "get_executor", get)
    executors._executor.cache_clear()
    result = {made.name: made for made in Credential.objects.all()}
    return Isles(ada, backend, configs, result)


@pytest.fixture
def run(isles: Isles, make_run: Any, s3: Any) -> Run:
    """A run on five backends; one job has ended with a message that quotes secrets."""
    pools = tuple(
        PoolDraft(
            backend=name,
            hardware=hardware,
            count=1,
            credential=isles.credentials[name].pk if name in isles.credentials else None,
        )
        for name, hardware in HARDWARE.items()
    )
    made = make_run(
        replicas=len(pools),
        pools=pools,
        rendezvous=f"s3://{s3.bucket}/secrets/{uuid.uuid4()}",
        store_credential=isles.credentials["store-s3"].pk,
    )
    launch_run(str(made.pk))
    for replica in made.replicas.order_by("number"):
        launch_replica(replica.pk)
    for replica in made.replicas.order_by("number"):
        key = replica.attempts.get().launch_key
        isles.backend.end(key, Cause.ERROR, code=1, message=f"output: {' '.join(CANARIES)}")
    reconcile_run(str(made.pk))
    made.refresh_from_db()
    return made


def absent(text: str, what: str) -> None:
    for canary in CANARIES:
        at = text.find(canary)
        assert at < 0, f"{canary} in {what}: …{text[max(0, at - 80) : at + 80]}…"


def tables() -> Iterator[tuple[str, str]]:
    """(table, its rows as text) without encrypted columns."""
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
            names = [column[0] for column in cursor.description]
            rows = [
                {n: v for n, v in zip(names, row, strict=True) if (table, n) != SEALED}
                for row in cursor.fetchall()
            ]
            yield table, repr(rows)


SEALED = ("runs_credential", "sealed")


def test_run_used_every_secret(isles: Isles, run: Run, s3: Any) -> None:
    """Otherwise the other tests would prove nothing."""
    used = {tuple(sorted(config.credentials.values())) for config in isles.configs}
    for name in HARDWARE:
        if name != "local":
            assert tuple(sorted(value.strip() for value in TYPED[name].values())) in used
    assert {spec.secrets["AWS_SECRET_ACCESS_KEY"] for spec in isles.backend.specs.values()} == {
        s3.secret_key
    }
    assert open_credential(isles.credentials["store-hf"]) == TYPED["store-hf"]
    assert len(isles.backend.specs) == len(HARDWARE)


def test_not_in_the_database(isles: Isles, run: Run) -> None:
    isles.backend.refuses = AccountError(f"401: {CANARIES}")
    replica = run.replicas.first()
    assert replica is not None
    type(replica).objects.filter(pk=replica.pk).update(state="restarting", relaunch_at=None)
    launch_replica(replica.pk)
    for credential in isles.credentials.values():
        isles.ada.post(f"/admin/runs/credential/{credential.pk}/test/", {"uri": run.rendezvous})
    result = dict(tables())
    assert "Test run" in result["runs_run"]
    assert "401: (" in result["runs_event"]
    assert "output: " in result["runs_replicaattempt"]
    assert "401: cannot use" in result["runs_credential"]
    assert len(result["django_admin_log"]) > 2
    for table, text in result.items():
        absent(text, table)


def test_not_in_the_bucket(run: Run, s3: Any) -> None:
    store = open_store(run.rendezvous, environment=s3.env)
    keys = [info.key for info in store.list("")]
    assert "group.json" in keys
    assert any(key.startswith("code/") for key in keys)
    for key in keys:
        absent(store.get(key).decode("latin-1"), key)


def test_not_in_unprotected_fields_of_jobs(isles: Isles, run: Run) -> None:
    backend = isles.backend
    for key, spec in backend.specs.items():
        output = [spec.labels, spec.options, backend.env[key], backend.args[key], backend.code[key]]
        absent(repr(output), f"the launch of {key}")
    absent(repr(list(run.replicas.values_list("attempts__handle"))), "handles")


def test_not_in_the_repr_of_objects(isles: Isles, run: Run) -> None:
    replica = run.replicas.select_related("pool").exclude(pool__backend="local").first()
    assert replica is not None
    opened = replica_secrets(run, replica, lifetime_s=None)
    things = [
        *isles.configs,
        *isles.backend.specs.values(),
        opened,
        store_access.s3_access(opened.environment),
        *isles.credentials.values(),
    ]
    for thing in things:
        absent(f"{thing!r} {thing}", type(thing).__name__)


def test_not_on_any_page(isles: Isles, run: Run) -> None:
    paths = [
        reverse("runs"),
        reverse("run", args=[run.pk]),
        reverse("run-snapshot", args=[run.pk]),
        reverse("run-logs", args=[run.pk]),
        reverse("run-new"),
        *(reverse("replica", args=[run.pk, r.number]) for r in run.replicas.all()),
        *(f"/admin/runs/{t}/" for t in ("run", "replica", "replicaattempt", "event", "credential")),
        *(
            f"/admin/runs/credential/{made.pk}/{page}/"
            for made in isles.credentials.values()
            for page in ("change", "history", "delete")
        ),
    ]
    shown = ""
    for path in paths:
        response = isles.ada.get(path)
        assert response.status_code == 200, path
        text = response.content.decode()
        absent(text, path)
        shown += text
    assert redaction.STRUCK_OUT in shown, "the message of the job is shown"


def test_not_in_the_logs(
    isles: Isles, run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    console = io.StringIO()
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            monkeypatch.setattr(handler, "stream", console)
    for credential in isles.credentials.values():
        isles.ada.post(f"/admin/runs/credential/{credential.pk}/test/", {"uri": run.rendezvous})
    isles.backend.away = "503"
    reconcile_run(str(run.pk))
    isles.backend.away = ""
    try:
        raise RuntimeError(f"a library quotes {CANARIES}")
    except RuntimeError:
        logging.getLogger("some.library").exception("failed with %s", CANARIES[0])
    output = console.getvalue()
    assert "a library quotes ('********'" in output
    absent(output, "the console")
    quoting = [record for record in caplog.records if record.name != "some.library"]
    absent("\n".join(record.getMessage() for record in quoting), "our own records")


def test_not_in_the_log_of_a_worker() -> None:
    """Celery has its own handlers and formats."""
    from celery.signals import after_setup_logger

    handler = logging.StreamHandler()
    logger = logging.Logger("celery-s")
    logger.addHandler(handler)
    after_setup_logger.send(None, logger=logger)
    redaction.remember(CANARIES)
    record = logging.LogRecord("x", logging.INFO, "x", 1, "got %s", (CANARIES[1],), None)
    assert handler.format(record).endswith("got ********")


# Error pages.


def failing(*args: Any, **kwargs: Any) -> Any:
    typed = dict(kwargs.get("typed") or {})
    raise RuntimeError(f"cannot store {typed}")


def test_not_on_the_error_page_of_a_form_that_fails(
    isles: Isles, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DEBUG = True
    monkeypatch.setattr("runs.admin.credential_form.save_credential", failing)
    isles.ada.raise_request_exception = False
    for kind, values in TYPED.items():
        data = {f"variable_{name}": f"  {value} " for name, value in values.items()}
        path = f"/admin/runs/credential/add/?kind={kind}"
        response = isles.ada.post(path, {"name": f"another {kind}", **data})
        text = response.content.decode()
        assert response.status_code == 500
        assert "RuntimeError" in text
        assert "Local vars" in text
        absent(text, f"the error page of {kind}")


def test_not_on_the_error_page_for_a_new_secret(
    isles: Isles, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that was never decrypted before."""
    settings.DEBUG = True
    monkeypatch.setattr(redaction, "_known", redaction.Known())
    monkeypatch.setattr("runs.admin.credential_form.save_credential", failing)
    isles.ada.raise_request_exception = False
    data = {"name": "new", "variable_HF_TOKEN": "hf_never_seen_before"}
    text = isles.ada.post("/admin/runs/credential/add/?kind=huggingface", data).content.decode()
    assert "RuntimeError" in text
    assert "hf_never_seen_before" not in text


@pytest.mark.parametrize("as_page", [True, False])
def test_not_in_an_error_report_with_many_secrets(
    isles: Isles, run: Run, settings: Any, as_page: bool
) -> None:
    settings.DEBUG = True
    secrets = {name: dict(open_credential(made)) for name, made in isles.credentials.items()}
    long = [secrets] * 20
    try:
        raise RuntimeError(f"{len(long)} times {secrets}") from ValueError(str(secrets["modal"]))
    except RuntimeError:
        kind: type[ExceptionReporter] = get_exception_reporter_class(None)
        reporter = kind(None, *sys.exc_info())
    text = reporter.get_traceback_html() if as_page else reporter.get_traceback_text()
    assert "RuntimeError" in text
    assert redaction.STRUCK_OUT in text
    absent(text, "the report")


def test_not_the_start_of_a_secret_in_a_truncated_value(isles: Isles) -> None:
    """The page truncates values to 4096 characters."""
    secret = open_credential(isles.credentials["modal"])["MODAL_TOKEN_SECRET"]
    cut = "x" * (4096 - 10) + secret
    try:
        raise RuntimeError(str(len(cut)))
    except RuntimeError:
        del secret
        text = get_exception_reporter_class(None)(None, *sys.exc_info()).get_traceback_html()
    assert "xxxxxxxx" in text
    assert f"x{TYPED['modal']['MODAL_TOKEN_SECRET'][:6]}" not in text


def canary_of_settings() -> str:
    """Concatenated, because the page shows lines of this file, too."""
    return "-".join(("canary", "of", "settings"))


def test_settings_on_an_error_page_have_no_keys(settings: Any) -> None:
    settings.DEBUG = True
    settings.CREDENTIALS_KEYS = (canary_of_settings(),)
    settings.REDIS_URL = settings.CELERY_BROKER_URL = f"redis://:{canary_of_settings()}@h/0"
    try:
        raise RuntimeError
    except RuntimeError:
        text = get_exception_reporter_class(None)(None, *sys.exc_info()).get_traceback_html()
    assert "CREDENTIALS_KEYS" in text
    assert canary_of_settings() not in text
