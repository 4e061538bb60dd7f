"""What the form refuses before any money is spent, and its Test buttons."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from executors.base import NeedsPerson, Problem, RetryLater
from runs.backends import parallel_calls
from runs.models import Replica, Run
from runs.submit.run_draft import PoolDraft
from tests.browser import seed
from tests.dashboard.stub_backend import Stub, stubbed
from tests.dashboard.test_pool_form import LOCAL, MODAL, credential, sent

pytestmark = pytest.mark.django_db

PLAIN = PoolDraft(backend="modal", hardware="H100", count=2)


@pytest.fixture(autouse=True)
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    yield from stubbed(monkeypatch)


@pytest.fixture
def olga(olga: Any, settings: Any, tmp_path: Path) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    settings.LOOPBACK_BACKENDS = frozenset({"modal"})
    return olga


def refused(client: Client, values: dict[str, str]) -> dict[str, list[str]]:
    answer = client.post("/runs/new", values)
    assert answer.status_code == 422
    assert not Run.objects.exists()
    errors: dict[str, list[str]] = answer.context["form"].all_errors
    for name in errors:
        assert f'data-errors-for="{name}"' in answer.content.decode()
    return errors


def test_a_run_on_two_backends_that_answer_is_launched(client: Client, olga: Any) -> None:
    answer = client.post("/runs/new", sent(LOCAL, MODAL))
    assert answer.status_code == 302, answer.context["form"].all_errors
    run = Run.objects.get()
    assert [(p.backend, p.count) for p in run.pools.order_by("id")] == [("local", 3), ("modal", 2)]
    pool = run.pools.get(backend="modal")
    assert (pool.region, pool.spot, pool.image) == ("us-east", True, "me/image:1")
    assert (pool.timeout_s, pool.price_usd_h) == (5400, 3.5)


# Who can reach what.


@pytest.mark.parametrize("rendezvous", ["", "{default}/mine"])
def test_a_place_of_this_machine_is_refused_with_a_remote_pool(
    client: Client, olga: Any, settings: Any, rendezvous: str
) -> None:
    settings.LOOPBACK_BACKENDS = frozenset()
    wanted = rendezvous.format(default=settings.DEFAULT_RENDEZVOUS)
    errors = refused(client, sent(LOCAL, MODAL, rendezvous=wanted))
    assert list(errors) == ["rendezvous"]
    assert "expected a bucket that replicas on modal can reach" in errors["rendezvous"][0]


def test_a_bucket_whose_endpoint_is_this_machine_is_refused_too(
    client: Client, olga: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.LOOPBACK_BACKENDS = frozenset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:8333")
    errors = refused(client, sent(MODAL, rendezvous="s3://bucket/run"))
    assert "s3://bucket/run at http://localhost:8333" in errors["rendezvous"][0]


def test_and_one_whose_credential_says_so(client: Client, olga: Any, settings: Any) -> None:
    from runs.actions.credentials import save_credential
    from runs.models import Credential

    settings.LOOPBACK_BACKENDS = frozenset()
    bucket = Credential(kind="store", name="here", options={"scheme": "s3"})
    keys = {"AWS_ACCESS_KEY_ID": "akid-1", "AWS_SECRET_ACCESS_KEY": "hidden-secret"}
    save_credential(bucket, typed=keys | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, actor=None)
    values = sent(MODAL, rendezvous="s3://bucket/run", store_credential=str(bucket.pk))
    assert "at http://127.0.0.1:1" in refused(client, values)["rendezvous"][0]


def test_text_of_this_machine_is_no_text_for_a_remote_pool(
    client: Client, olga: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    settings.LOOPBACK_BACKENDS = frozenset()
    monkeypatch.setattr("runs.submit.preflight.check_rendezvous", lambda *a, **o: [])
    errors = refused(client, sent(MODAL, data_source="uri", data=str(tmp_path)))
    assert "by replicas on modal" in errors["data"][0]


def test_a_credential_for_another_kind_of_bucket_is_said(client: Client, olga: Any) -> None:
    from runs.actions.credentials import save_credential
    from runs.models import Credential

    bucket = Credential(kind="store", name="gcs", options={"scheme": "gs"})
    save_credential(bucket, typed={"FSSPEC_GS": "{}"}, actor=None)
    errors = refused(client, sent(LOCAL, store_credential=str(bucket.pk)))
    assert "to be in gs://" in errors["rendezvous"][0]


# What the backend says.


def test_a_credential_that_does_not_work_is_said_in_the_backend_s_words(
    client: Client, olga: Any, modal: Stub
) -> None:
    mine = credential("modal", "mine")
    modal.error = NeedsPerson("Token ID is malformed: ak-very-secret")
    values = sent(LOCAL, MODAL) | {"pools.1.credential": str(mine.pk)}
    errors = refused(client, values)
    assert errors == {"pools.1.credential": ["Modal: Token ID is malformed: ********"]}


def test_problems_stand_at_the_fields_of_their_pool(client: Client, olga: Any, modal: Stub) -> None:
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
    client: Client, olga: Any, modal: Stub
) -> None:
    client.post(
        "/runs/new", sent(PLAIN, dataclasses.replace(PLAIN, count=5), MODAL, max_replicas="16")
    )
    assert sorted(count for _, count in modal.asked) == [2, 7, 7]
    spec = next(spec for spec, _ in modal.asked if spec.spot)
    assert (spec.hardware, spec.region, spec.timeout_s) == ("H100", "us-east", 5400)


def test_a_backend_that_is_down_is_said(client: Client, olga: Any, modal: Stub) -> None:
    modal.error = RetryLater("503: try again")
    errors = refused(client, sent(PLAIN))
    assert errors == {"pools.0.backend": ["Modal could not be asked: 503: try again"]}


def test_a_dead_backend_is_a_message_and_no_hanging_form(
    client: Client, olga: Any, modal: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_calls, "PATIENCE_S", 0.3)
    modal.hang = threading.Event()
    errors = refused(client, sent(LOCAL, PLAIN))
    assert errors == {"pools.1.backend": ["Modal could not be asked: no answer within 0.3 s"]}


def test_a_client_that_breaks_is_no_error_page_and_tells_nothing(
    client: Client, olga: Any, modal: Stub
) -> None:
    modal.error = KeyError("as-something-inside")
    errors = refused(client, sent(PLAIN))
    assert errors == {"pools.0.backend": ["Modal could not be asked: KeyError"]}


@pytest.mark.parametrize(
    ("pool", "field", "said"),
    [
        (dataclasses.replace(PLAIN, spot=True), "spot", "Modal has no spot machines"),
        (dataclasses.replace(PLAIN, image="x"), "image", "takes no image"),
        (dataclasses.replace(PLAIN, timeout_s=90_000), "timeout_s", "at most the 3600 s"),
    ],
)
def test_what_a_backend_cannot_do_at_all_needs_no_asking(
    client: Client, olga: Any, modal: Stub, pool: PoolDraft, field: str, said: str
) -> None:
    modal.can(spot=False, images=False, max_lifetime_s=3600.0)
    errors = refused(client, sent(pool))
    assert list(errors) == [f"pools.0.{field}"]
    assert said in errors[f"pools.0.{field}"][0]
    assert modal.asked == []


# Time and money.


def earlier_run(rate: float) -> None:
    """The demo's model at so many tokens a second on one H100: a round of the form's is 46,080."""
    made = seed.run(seed.user("old", "operator"), committed=0, replicas=1)
    made.pools.update(backend="modal", hardware="H100")
    Replica.objects.filter(run=made).update(tokens_per_s=rate)


def test_a_deadline_shorter_than_a_few_rounds_is_refused(client: Client, olga: Any) -> None:
    earlier_run(4608.0)  # a round takes 10 s
    Run.objects.update(rendezvous="file:///elsewhere")
    values = sent(dataclasses.replace(PLAIN, timeout_s=20))
    answer = client.post("/runs/new", values)
    errors = answer.context["form"].all_errors
    assert errors == {
        "pools.0.timeout_s": [
            "expected at least 3 rounds, about 30 s at the rate of earlier runs, found 20 s"
        ]
    }
    assert client.post("/runs/new", values | {"pools.0.timeout_s": "31s"}).status_code == 302


def test_a_budget_below_the_estimate_is_refused_unless_that_is_meant(
    client: Client, olga: Any
) -> None:
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


def test_a_budget_needs_prices(client: Client, olga: Any) -> None:
    unpriced = PoolDraft(backend="kubernetes", hardware="gpu", count=1)
    errors = refused(client, sent(LOCAL, unpriced, budget_usd="3"))
    assert list(errors) == ["pools.1.price_usd_h"]


def test_the_estimate_tells_prices_of_rows_and_of_the_whole(client: Client, olga: Any) -> None:
    ask = lambda *pools, **more: client.post("/runs/estimate.json", sent(*pools, **more)).json()  # noqa: E731
    two = dataclasses.replace(PLAIN, price_usd_h=4.0)
    found = ask(LOCAL, two)["estimate"]
    assert found["pool_usd_h"] == [0.0, 8.0]
    assert (found["usd_h"], found["usd"]) == (8.0, 4.0)
    assert found["usd_text"] == "at most $4.00 in 30m 00s, the time limit"
    found = ask(two, time_limit_s="")["estimate"]
    assert found["usd"] is None
    assert "unknown without a time limit" in found["usd_text"]
    found = ask(PoolDraft(backend="kubernetes", hardware="gpu"))["estimate"]
    assert found["usd_h"] is None
    assert found["usd_text"] == "unknown in 30m 00s: a price is missing"


# Test buttons.


def test_a_pool_says_who_we_are(client: Client, olga: Any, modal: Stub) -> None:
    values = sent(LOCAL, PLAIN, name="", sync_every="x")  # the rest need not be right yet
    answer = client.post("/runs/test.json", values | {"test": "pools.1"}).json()
    assert answer == {"ok": True, "said": "Works: workspace acme", "errors": {}}
    assert [count for _, count in modal.asked] == [2]


def test_a_pool_says_what_is_wrong_at_its_fields(client: Client, olga: Any, modal: Stub) -> None:
    modal.error = NeedsPerson("no such token")
    answer = client.post("/runs/test.json", sent(LOCAL, PLAIN) | {"test": "pools.1"}).json()
    assert answer == {
        "ok": False,
        "said": "",
        "errors": {"pools.1.credential": ["Modal: no such token"]},
    }


def test_a_row_that_is_wrong_is_not_asked_about(client: Client, olga: Any, modal: Stub) -> None:
    values = sent(PLAIN) | {"test": "pools.0", "pools.0.count": "0"}
    answer = client.post("/runs/test.json", values).json()
    assert list(answer["errors"]) == ["pools.0.count"]
    assert modal.asked == []


def test_the_bucket_is_written_to_and_left_clean(client: Client, olga: Any, tmp_path: Path) -> None:
    values = sent(LOCAL, rendezvous=str(tmp_path / "mine")) | {"test": "rendezvous"}
    answer = client.post("/runs/test.json", values).json()
    assert answer["ok"] is True
    assert answer["said"].startswith("Works: wrote, read")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    (tmp_path / "file").touch()
    values["rendezvous"] = str(tmp_path / "file" / "run")
    answer = client.post("/runs/test.json", values).json()
    assert list(answer["errors"]) == ["rendezvous"]


@pytest.mark.parametrize("what", ["", "moon", "pools.9", "pools.0.credential"])
def test_nothing_else_can_be_tested(client: Client, olga: Any, what: str) -> None:
    assert client.post("/runs/test.json", sent(LOCAL) | {"test": what}).status_code == 400


def test_without_javascript_the_answer_stands_on_the_page(
    client: Client, olga: Any, modal: Stub
) -> None:
    answer = client.post("/runs/new", sent(LOCAL, PLAIN) | {"test": "pools.1"})
    assert answer.status_code == 200
    assert "Works: workspace acme" in answer.content.decode()
    modal.error = NeedsPerson("no such token")
    answer = client.post("/runs/new", sent(LOCAL, PLAIN, name="") | {"test": "pools.1"})
    assert answer.context["form"].all_errors == {"pools.1.credential": ["Modal: no such token"]}
    page = answer.content.decode()
    assert "no such token" in page
    assert "Nothing was launched" not in page
