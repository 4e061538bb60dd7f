"""Checks of the form before any cost arises, and its Test buttons."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from diloco.store.base import LocalStore
from executors.base import AccountError, Problem, RetryLater
from runs.backends import parallel_calls
from runs.models import Replica, Run
from runs.submit.run_draft import PoolDraft
from tests.browser import seed
from tests.dashboard.stub_backend import Stub, stubbed
from tests.dashboard.test_pool_form import LOCAL, MODAL, credential, sent
from tests.diloco.data.shards import write_shards

pytestmark = pytest.mark.django_db

PLAIN = PoolDraft(backend="modal", hardware="H100", count=2)


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


@pytest.fixture
def operator_user(operator_user: Any, settings: Any) -> Any:
    settings.LOOPBACK_BACKENDS = frozenset({"modal"})
    return operator_user


def refused(client: Client, values: dict[str, str]) -> dict[str, list[str]]:
    response = client.post("/runs/new", values)
    assert response.status_code == 422
    assert not Run.objects.exists()
    errors: dict[str, list[str]] = response.context["form"].all_errors
    for name in errors:
        assert f'data-errors-for="{name}"' in response.content.decode()
    return errors


def test_a_run_on_two_backends_that_answer_is_launched(client: Client, operator_user: Any) -> None:
    response = client.post("/runs/new", sent(LOCAL, MODAL))
    assert response.status_code == 302, response.context["form"].all_errors
    run = Run.objects.get()
    assert [(p.backend, p.count) for p in run.pools.order_by("id")] == [("local", 3), ("modal", 2)]
    pool = run.pools.get(backend="modal")
    assert (pool.region, pool.spot, pool.image) == ("us-east", True, "me/image:1")
    assert (pool.timeout_s, pool.price_usd_h) == (5400, 3.5)


# Reachability.


@pytest.mark.parametrize("rendezvous", ["", "{default}/mine"])
def test_a_local_rendezvous_is_rejected_with_a_remote_pool(
    client: Client, operator_user: Any, settings: Any, rendezvous: str
) -> None:
    settings.LOOPBACK_BACKENDS = frozenset()
    wanted = rendezvous.format(default=settings.DEFAULT_RENDEZVOUS)
    errors = refused(client, sent(LOCAL, MODAL, rendezvous=wanted))
    assert list(errors) == ["rendezvous"]
    assert "expected a bucket that replicas on modal can reach" in errors["rendezvous"][0]


def test_a_bucket_endpoint_on_this_machine_is_rejected(
    client: Client, operator_user: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.LOOPBACK_BACKENDS = frozenset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:8333")
    errors = refused(client, sent(MODAL, rendezvous="s3://bucket/run"))
    assert "s3://bucket/run at http://localhost:8333" in errors["rendezvous"][0]


def test_a_credential_endpoint_on_this_machine_is_rejected(
    client: Client, operator_user: Any, settings: Any
) -> None:
    from runs.actions.credentials import save_credential
    from runs.models import Credential

    settings.LOOPBACK_BACKENDS = frozenset()
    bucket = Credential(kind="store", name="here", options={"scheme": "s3"})
    keys = {"AWS_ACCESS_KEY_ID": "akid-1", "AWS_SECRET_ACCESS_KEY": "hidden-secret"}
    save_credential(bucket, typed=keys | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, actor=None)
    values = sent(MODAL, rendezvous="s3://bucket/run", store_credential=str(bucket.pk))
    assert "at http://127.0.0.1:1" in refused(client, values)["rendezvous"][0]


def test_local_data_is_rejected_with_a_remote_pool(
    client: Client,
    operator_user: Any,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.txt").write_text("text")
    settings.LOOPBACK_BACKENDS = frozenset()
    monkeypatch.setattr("runs.submit.preflight.check_rendezvous", lambda *a, **o: [])
    errors = refused(client, sent(MODAL, data_source="uri", data=str(tmp_path)))
    assert "by replicas on modal" in errors["data"][0]


def test_a_credential_for_another_kind_of_bucket_is_reported(
    client: Client, operator_user: Any
) -> None:
    from runs.actions.credentials import save_credential
    from runs.models import Credential

    bucket = Credential(kind="store", name="gcs", options={"scheme": "gs"})
    save_credential(bucket, typed={"FSSPEC_GS": "{}"}, actor=None)
    errors = refused(client, sent(LOCAL, store_credential=str(bucket.pk)))
    assert "to be in gs://" in errors["rendezvous"][0]


# Checks by the backend.


def test_an_invalid_credential_is_reported_with_the_backend_message(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    own = credential("modal", "mine")
    modal.error = AccountError("Token ID is malformed: ak-very-secret")
    values = sent(LOCAL, MODAL) | {"pools.1.credential": str(own.pk)}
    errors = refused(client, values)
    assert errors == {"pools.1.credential": ["Modal: Token ID is malformed: ********"]}


def test_preflight_problems_are_shown_at_their_pool(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    modal.problems = [
        Problem(field="hardware", message="quota of 1 GPU"),
        Problem(field="region", message="no H100 there"),
        Problem(field="namespace", message="no such namespace"),
    ]
    assert refused(client, sent(LOCAL, PLAIN)) == {
        "pools.1.hardware": ["quota of 1 GPU"],
        "pools.1.region": ["no H100 there"],
        "pools.1.backend": ["no such namespace"],
    }


def test_pools_that_share_a_quota_are_counted_together(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    client.post(
        "/runs/new", sent(PLAIN, dataclasses.replace(PLAIN, count=5), MODAL, max_replicas="16")
    )
    assert sorted(count for _, count in modal.preflights) == [2, 7, 7]
    spec = next(spec for spec, _ in modal.preflights if spec.spot)
    assert (spec.hardware, spec.region, spec.timeout_s) == ("H100", "us-east", 5400)


def test_an_unreachable_backend_is_reported(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    modal.error = RetryLater("503: try again")
    errors = refused(client, sent(PLAIN))
    assert errors == {"pools.0.backend": ["Modal could not be checked: 503: try again"]}


def test_a_hanging_backend_does_not_block_the_form(
    client: Client, operator_user: Any, modal: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_calls, "PATIENCE_S", 2.0)
    modal.hang = threading.Event()
    errors = refused(client, sent(LOCAL, PLAIN))  # on a busy machine the other checks too
    assert errors["pools.1.backend"] == ["Modal could not be checked: no answer within 2 s"]


def test_a_crashing_client_shows_no_error_page_and_no_secret(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    modal.error = KeyError("as-something-inside")
    errors = refused(client, sent(PLAIN))
    assert errors == {"pools.0.backend": ["Modal could not be checked: KeyError"]}


@pytest.mark.parametrize(
    ("pool", "field", "output"),
    [
        (dataclasses.replace(PLAIN, spot=True), "spot", "the backend has no spot machines"),
        (dataclasses.replace(PLAIN, image="x"), "image", "expected none"),
        (dataclasses.replace(PLAIN, timeout_s=90_000), "timeout_s", "at most 3600 s"),
    ],
)
def test_unsupported_options_are_rejected_without_a_request(
    client: Client, operator_user: Any, modal: Stub, pool: PoolDraft, field: str, output: str
) -> None:
    modal.can(spot=False, images=False, max_lifetime_s=3600.0)
    errors = refused(client, sent(pool))
    assert list(errors) == [f"pools.0.{field}"]
    assert output in errors[f"pools.0.{field}"][0]
    assert modal.preflights == []


# Time and cost.


def earlier_run(rate: float) -> None:
    """The demo's model at that many tokens per second on one H100; a round has 46,080 tokens."""
    created = seed.run(seed.user("old", "operator"), committed=0, replicas=1)
    created.pools.update(backend="modal", hardware="H100")
    Replica.objects.filter(run=created).update(tokens_per_s=rate)


def test_a_time_limit_below_a_few_rounds_is_rejected(client: Client, operator_user: Any) -> None:
    earlier_run(4608.0)  # a round takes 10 s
    Run.objects.update(rendezvous="file:///elsewhere")
    values = sent(dataclasses.replace(PLAIN, timeout_s=20))
    response = client.post("/runs/new", values)
    errors = response.context["form"].all_errors
    assert errors == {
        "pools.0.timeout_s": [
            "expected at least 3 rounds, about 30 s at the rate of earlier runs, found 20 s"
        ]
    }
    assert client.post("/runs/new", values | {"pools.0.timeout_s": "31s"}).status_code == 302


def test_a_budget_below_the_estimate_needs_confirmation(client: Client, operator_user: Any) -> None:
    values = sent(dataclasses.replace(PLAIN, price_usd_h=4.0), budget_usd="3")  # 30 minutes
    errors = refused(client, values)
    assert errors == {
        "budget_usd": [
            "expected at least $4.00, the estimate to the time limit (0.5 h at $8.00 an hour), "
            "found $3.00"
        ]
    }
    assert client.post("/runs/new", values | {"over_budget": "on"}).status_code == 302
    assert Run.objects.get().budget_usd == 3.0


def test_a_budget_needs_prices(client: Client, operator_user: Any) -> None:
    unpriced = PoolDraft(backend="kubernetes", hardware="gpu", count=1)
    errors = refused(client, sent(LOCAL, unpriced, budget_usd="3"))
    assert list(errors) == ["pools.1.price_usd_h"]


def test_the_estimate_has_prices_per_pool_and_in_total(client: Client, operator_user: Any) -> None:
    ask = lambda *pools, **more: client.post("/runs/estimate.json", sent(*pools, **more)).json()  # noqa: E731
    two = dataclasses.replace(PLAIN, price_usd_h=4.0)
    result = ask(LOCAL, two)["estimate"]
    assert result["pool_usd_h"] == [0.0, 8.0]
    assert (result["usd_h"], result["usd"]) == (8.0, 4.0)
    assert result["usd_text"] == "at most $4.00 in 30m 00s, the time limit"
    result = ask(two, time_limit_s="")["estimate"]
    assert result["usd"] is None
    assert "unknown without a time limit" in result["usd_text"]
    result = ask(PoolDraft(backend="kubernetes", hardware="gpu"))["estimate"]
    assert result["usd_h"] is None
    assert result["usd_text"] == "unknown in 30m 00s: a price is missing"


# Test buttons.


def test_the_pool_test_shows_the_account(client: Client, operator_user: Any, modal: Stub) -> None:
    values = sent(LOCAL, PLAIN, name="", sync_every="x")  # other fields can still be invalid
    response = client.post("/runs/test.json", values | {"test": "pools.1"}).json()
    assert response == {"ok": True, "message": "Works: workspace acme", "errors": {}}
    assert [count for _, count in modal.preflights] == [2]


def test_the_pool_test_shows_errors_at_their_fields(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    modal.error = AccountError("no such token")
    response = client.post("/runs/test.json", sent(LOCAL, PLAIN) | {"test": "pools.1"}).json()
    assert response == {
        "ok": False,
        "message": "",
        "errors": {"pools.1.credential": ["Modal: no such token"]},
    }


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (AccountError("x" * 3_000_000), f"Modal: {'x' * 3992}…"),
        (RetryLater("\ud800\0"), "Modal could not be checked: ?\ufffd"),
        (AccountError(""), "Modal: AccountError"),
        (KeyError("anything"), "Modal could not be checked: KeyError"),
    ],
)
def test_whatever_a_backend_answers_is_a_short_message(
    client: Client, operator_user: Any, modal: Stub, error: Exception, shown: str
) -> None:
    modal.error = error
    response = client.post("/runs/test.json", sent(LOCAL, PLAIN) | {"test": "pools.1"}).json()
    assert list(response["errors"].values()) == [[shown]]
    page = client.post("/runs/new", sent(LOCAL, PLAIN) | {"test": "pools.1"})
    assert shown in page.content.decode()


def test_an_invalid_row_is_not_tested(client: Client, operator_user: Any, modal: Stub) -> None:
    values = sent(PLAIN) | {"test": "pools.0", "pools.0.count": "0"}
    response = client.post("/runs/test.json", values).json()
    assert list(response["errors"]) == ["pools.0.count"]
    assert modal.preflights == []


def test_the_bucket_is_written_to_and_left_clean(
    client: Client, operator_user: Any, tmp_path: Path
) -> None:
    values = sent(LOCAL, rendezvous=str(tmp_path / "mine")) | {"test": "rendezvous"}
    response = client.post("/runs/test.json", values).json()
    assert response["ok"] is True
    assert response["message"].startswith("Works: wrote, read")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    (tmp_path / "file").touch()
    values["rendezvous"] = str(tmp_path / "file" / "run")
    response = client.post("/runs/test.json", values).json()
    assert list(response["errors"]) == ["rendezvous"]


@pytest.mark.parametrize("what", ["", "moon", "pools.9", "pools.0.credential"])
def test_nothing_else_can_be_tested(client: Client, operator_user: Any, what: str) -> None:
    assert client.post("/runs/test.json", sent(LOCAL) | {"test": what}).status_code == 400


def test_without_javascript_the_page_shows_the_result(
    client: Client, operator_user: Any, modal: Stub
) -> None:
    response = client.post("/runs/new", sent(LOCAL, PLAIN) | {"test": "pools.1"})
    assert response.status_code == 200
    assert "Works: workspace acme" in response.content.decode()
    modal.error = AccountError("no such token")
    response = client.post("/runs/new", sent(LOCAL, PLAIN, name="") | {"test": "pools.1"})
    assert response.context["form"].all_errors == {"pools.1.credential": ["Modal: no such token"]}
    page = response.content.decode()
    assert "no such token" in page
    assert "Nothing was launched" not in page


# Token shards.


@pytest.mark.parametrize("kind", ["byte_gpt", "huggingface"])
def test_a_run_on_token_shards_is_launched(
    client: Client, operator_user: Any, settings: Any, tmp_path: Path, kind: str
) -> None:
    settings.DATA_ROOTS = [tmp_path]
    write_shards(LocalStore(tmp_path / "tokens"), shards=2, tokens=8000, vocabulary=256)
    config = '{"model_type": "llama", "vocab_size": 256}' if kind == "huggingface" else ""
    data = (tmp_path / "tokens").as_uri()
    values = sent(
        LOCAL,
        workload=kind,
        data_source="shards",
        data=data,
        config=config,
        data_coverage="units",
    )
    response = client.post("/runs/new", values)
    assert response.status_code == 302, response.context["form"].all_errors
    run = Run.objects.get()
    assert (run.workload["data"], run.workload["data_format"]) == (data, "shards")
    assert run.workload["data_coverage"] == "units"
    again = client.get(f"/runs/new?clone={run.pk}")
    assert again.context["form"]["data_source"].value() == "shards"
    assert again.context["form"]["data"].value() == data
    assert again.context["form"]["data_coverage"].value() == "units"


@pytest.mark.parametrize(
    ("shards", "changes", "message"),
    [
        (None, {}, "expected index.json at"),
        ({"vocabulary": 300}, {}, "expected tokens for a model of 256, found 300"),
        ({"tokens": 200}, {}, "expected at least"),
        (
            {},
            {"data_coverage": "units", "sync_every": "20", "num_fragments": "2"},
            "expected 1 with work units",
        ),
        ({}, {"data": ""}, "Enter the URI of token shards"),
        ({}, {"data": "/etc"}, "outside of the data folders of this server"),
        ({}, {"data": "http://host/tokens"}, "http"),
    ],
)
def test_token_shards_that_cannot_be_trained_on_are_refused(
    client: Client,
    operator_user: Any,
    settings: Any,
    tmp_path: Path,
    shards: dict[str, int] | None,
    changes: dict[str, str],
    message: str,
) -> None:
    settings.DATA_ROOTS = [tmp_path]
    (tmp_path / "tokens").mkdir()
    if shards is not None:
        write_shards(
            LocalStore(tmp_path / "tokens"),
            **{"shards": 2, "tokens": 8000, "vocabulary": 256} | shards,
        )
    data = {"data": (tmp_path / "tokens").as_uri()} | changes
    errors = refused(client, sent(LOCAL, data_source="shards", **data))
    assert message in errors["data"][0]
