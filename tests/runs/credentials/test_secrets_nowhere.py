"""Secrets of every kind are typed in, used by a run, quoted by backends and lost in errors; then
everything that is written or shown is searched for them.

Backends are not there: what they are asked is recorded. The same with real jobs on emulated
backends, and with what is in files and in the arguments of processes, is in
``tests/e2e/test_secrets_on_backends.py``.
"""

from __future__ import annotations

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
from executors.base import Cause, ExecutorConfig, NeedsPerson
from runs import redaction
from runs.credentials import open_credential, replica_secrets
from runs.credentials.kinds import KINDS
from runs.models import Credential, Run
from runs.reconcile.launch import launch_replica, launch_run
from runs.reconcile.reconciler import reconcile_run
from runs.submit.run_draft import PoolDraft
from tests.runs import world as w

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
    "ak-canary-modal", "as-canary-modal", "hf_canary_jobs", "AKIACANARYSAGEMAKER",
    "canary/of+sagemaker", "canary-session-of-sagemaker==", "canary-of-the-cluster",
    "canary-of-google", "canaryofazure==", "hf_canary_store", "test-secret",
)  # fmt: skip
"""``test-secret`` is the real one of the tests' S3 server."""
HARDWARE = {
    "local": "cpu", "modal": "cpu", "huggingface": "cpu-basic", "sagemaker": "ml.m5.large",
    "kubernetes": "cpu",
}  # fmt: skip


@dataclass
class Isles:
    """An administrator, credentials of all kinds, a backend that repeats what it was given."""

    ada: Client
    backend: Backend
    configs: list[ExecutorConfig]
    credentials: dict[str, Credential]


class Backend(w.FakeExecutor):
    """Quotes its credentials in all it says."""

    config = ExecutorConfig()

    def check(self) -> str:
        raise NeedsPerson(f"401: cannot use {dict(self.config.credentials)}")


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
        answer = ada.post(f"/admin/runs/credential/add/?kind={kind}", {"name": kind, **data})
        assert answer.status_code == 302, answer.context["adminform"].form.errors
    backend, configs = Backend(), []

    def get(name: str, config: ExecutorConfig) -> Backend:
        configs.append(config)
        backend.config = config
        return backend

    monkeypatch.setattr(executors, "get_executor", get)
    executors._executor.cache_clear()
    found = {made.name: made for made in Credential.objects.all()}
    return Isles(ada, backend, configs, found)


@pytest.fixture
def run(isles: Isles, make_run: Any, s3: Any) -> Run:
    """On five backends at once, launched, and one job ended with a message that quotes secrets."""
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
        isles.backend.end(key, Cause.ERROR, code=1, said=f"said: {' '.join(CANARIES)}")
    reconcile_run(str(made.pk))
    made.refresh_from_db()
    return made


def absent(text: str, what: str) -> None:
    for canary in CANARIES:
        at = text.find(canary)
        assert at < 0, f"{canary} in {what}: …{text[max(0, at - 80) : at + 80]}…"


def tables() -> Iterator[tuple[str, str]]:
    """(table, all its rows as text), without what is sealed."""
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


def test_the_run_used_them_all(isles: Isles, run: Run, s3: Any) -> None:
    """Else the others would search in vain."""
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
    isles.backend.refuses = NeedsPerson(f"401: {CANARIES}")
    replica = run.replicas.first()
    assert replica is not None
    type(replica).objects.filter(pk=replica.pk).update(state="restarting", relaunch_at=None)
    launch_replica(replica.pk)
    for credential in isles.credentials.values():
        isles.ada.post(f"/admin/runs/credential/{credential.pk}/test/", {"uri": run.rendezvous})
    found = dict(tables())
    assert "Test run" in found["runs_run"]
    assert "401: (" in found["runs_event"]
    assert "said: " in found["runs_replicaattempt"]
    assert "401: cannot use" in found["runs_credential"]
    assert len(found["django_admin_log"]) > 2
    for table, text in found.items():
        absent(text, table)


def test_not_in_the_bucket(run: Run, s3: Any) -> None:
    store = open_store(run.rendezvous, environment=s3.env)
    keys = [info.key for info in store.list("")]
    assert "group.json" in keys
    assert any(key.startswith("code/") for key in keys)
    for key in keys:
        absent(store.get(key).decode("latin-1"), key)


def test_not_in_what_is_no_secret_to_backends(isles: Isles, run: Run) -> None:
    backend = isles.backend
    for key, spec in backend.specs.items():
        said = [spec.labels, spec.options, backend.env[key], backend.args[key], backend.code[key]]
        absent(repr(said), f"the launch of {key}")
    absent(repr(list(run.replicas.values_list("attempts__handle"))), "handles")


def test_not_in_the_text_of_our_own_objects(isles: Isles, run: Run) -> None:
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
        answer = isles.ada.get(path)
        assert answer.status_code == 200, path
        text = answer.content.decode()
        absent(text, path)
        shown += text
    assert redaction.STRUCK_OUT in shown, "what the job said is shown"


def test_not_in_the_logs(
    isles: Isles, run: Run, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    for credential in isles.credentials.values():
        isles.ada.post(f"/admin/runs/credential/{credential.pk}/test/", {"uri": run.rendezvous})
    isles.backend.away = "503"
    reconcile_run(str(run.pk))
    isles.backend.away = ""
    try:
        raise RuntimeError(f"a library quotes {CANARIES}")
    except RuntimeError:
        logging.getLogger("some.library").exception("failed with %s", CANARIES[0])
    said = capfd.readouterr().err
    assert "a library quotes ('********'" in said
    absent(said, "the console")
    quoting = [record for record in caplog.records if record.name != "some.library"]
    absent("\n".join(record.getMessage() for record in quoting), "our own records")


def test_not_in_the_log_of_a_worker() -> None:
    """Celery brings handlers and formats of its own."""
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
    monkeypatch.setattr("runs.admin.credentials.save_credential", failing)
    isles.ada.raise_request_exception = False
    for kind, values in TYPED.items():
        data = {f"variable_{name}": f"  {value} " for name, value in values.items()}
        path = f"/admin/runs/credential/add/?kind={kind}"
        answer = isles.ada.post(path, {"name": f"another {kind}", **data})
        text = answer.content.decode()
        assert answer.status_code == 500
        assert "RuntimeError" in text
        assert "Local vars" in text
        absent(text, f"the error page of {kind}")


def test_not_on_the_error_page_of_one_never_seen_before(
    isles: Isles, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed for the first time, and nothing was opened yet."""
    settings.DEBUG = True
    monkeypatch.setattr(redaction, "_known", redaction.Known())
    monkeypatch.setattr("runs.admin.credentials.save_credential", failing)
    isles.ada.raise_request_exception = False
    data = {"name": "new", "variable_HF_TOKEN": "hf_never_seen_before"}
    text = isles.ada.post("/admin/runs/credential/add/?kind=huggingface", data).content.decode()
    assert "RuntimeError" in text
    assert "hf_never_seen_before" not in text


@pytest.mark.parametrize("as_page", [True, False])
def test_not_in_the_report_of_an_error_with_secrets_all_over(
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


def test_not_the_beginning_of_one_where_a_long_value_is_cut_off(isles: Isles) -> None:
    """The page shows 4096 characters of a value."""
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
    """Not in one word: the page shows lines of this file too."""
    return "-".join(("canary", "of", "settings"))


def test_the_settings_on_an_error_page_have_no_keys_either(settings: Any) -> None:
    settings.DEBUG = True
    settings.CREDENTIALS_KEYS = (canary_of_settings(),)
    settings.REDIS_URL = settings.CELERY_BROKER_URL = f"redis://:{canary_of_settings()}@h/0"
    try:
        raise RuntimeError
    except RuntimeError:
        text = get_exception_reporter_class(None)(None, *sys.exc_info()).get_traceback_html()
    assert "CREDENTIALS_KEYS" in text
    assert canary_of_settings() not in text
