"""The text sample on the Checkpoints tab: before the end, without a sample, and with one."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from runs.models import ReplicaAttempt, Run
from tests.browser import seed, seed_usage

pytestmark = pytest.mark.django_db

HEADING = "Sample text"


def created(client: Client, *, state: str = "succeeded", kind: str = "") -> Run:
    operator_user = seed.user("olga", "operator")
    client.force_login(operator_user)
    run: Run = seed.run(operator_user, committed=4, replicas=2, state=state)
    if kind:
        run.workload = {**run.workload, "kind": kind}
        run.save()
    return run


def tab(client: Client, run: Run) -> str:
    return client.get(reverse("run-checkpoints", args=[run.pk])).content.decode()


def test_before_the_end_the_tab_announces_the_sample(client: Client) -> None:
    run = created(client, state="running")
    text = tab(client, run)
    assert HEADING in text and "when the run finishes" in text
    assert "diloco.generate" not in text, "there are no weights yet"
    seed_usage.checkpoints(run, 0, 4)
    assert f"python -m diloco.generate {run.rendezvous}" in tab(client, run)


def test_the_sample_is_escaped_and_has_its_parameters(client: Client) -> None:
    run = created(client)
    seed_usage.checkpoints(run, 4, final=True, sample=seed_usage.SAMPLE)
    text = tab(client, run)
    assert "round 20, temperature 0.7, seed 0" in text
    assert "<b>def </b>test_count(self):\n" in text
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in text and "<b>a & b</b>" not in text
    assert "time limit" not in text and "an empty prompt" not in text
    assert f"python -m diloco.generate {run.rendezvous} --seed 1" in text
    page = client.get(reverse("run", args=[run.pk]) + "?tab=checkpoints").content.decode()
    assert "test_count(self)" in page


def test_a_truncated_sample_is_marked(client: Client) -> None:
    run = created(client)
    sample = {**seed_usage.SAMPLE, "prompt": "", "whole": False}
    seed_usage.checkpoints(run, 4, final=True, sample=sample)
    text = tab(client, run)
    assert "an empty prompt, cut off by the time limit" in text
    assert "<b></b>" not in text
    assert ">\n" + seed_usage.SAMPLE["text"][:9] in text, "a browser drops the first end of a line"


@pytest.mark.parametrize(
    ("state", "final", "open_job", "words"),
    [
        ("succeeded", True, False, "No sample was written"),
        ("succeeded", True, True, "a replica may still be generating a sample"),
        ("failed", False, False, "The run ended without final weights"),
    ],
)
def test_messages_without_a_sample(
    client: Client, state: str, final: bool, open_job: bool, words: str
) -> None:
    run = created(client, state=state)
    seed_usage.checkpoints(run, 4, final=final)
    ReplicaAttempt.objects.create(
        replica=run.replicas.get(number=0),
        number=1,
        launch_key=f"{run.pk}-0-1",
        created_at=run.created_at,
        ended_at=None if open_job else run.created_at,
    )
    assert words in tab(client, run)


def test_custom_workloads_have_no_sample(client: Client) -> None:
    run = created(client, kind="custom")
    seed_usage.checkpoints(run, 4, final=True)
    assert HEADING not in tab(client, run)


def test_the_shown_command_supports_the_workload(client: Client) -> None:
    run = created(client, kind="huggingface")
    seed_usage.checkpoints(run, 4, final=True)
    text = tab(client, run)
    assert f"python -m diloco.export {run.rendezvous} model" in text
    assert "diloco.generate" not in text


def test_the_sample_requires_access_to_the_run(client: Client) -> None:
    run = created(client)
    seed_usage.checkpoints(run, 4, final=True, sample=seed_usage.SAMPLE)
    address = reverse("run-checkpoints", args=[run.pk])
    for name, role in (("vera", "viewer"), ("otto", "operator")):
        client.force_login(seed.user(name, role))
        assert "test_count(self)" in client.get(address).content.decode()
    client.logout()
    response = client.get(address)
    assert response.status_code in (302, 401, 403) and b"test_count" not in response.content


def test_the_api_returns_the_sample(client: Client) -> None:
    run = created(client)
    seed_usage.checkpoints(run, 4, final=True, sample=seed_usage.SAMPLE)
    rows: list[dict[str, Any]] = client.get(f"/api/runs/{run.pk}/checkpoints").json()
    assert [row["sample"] for row in rows] == [None, seed_usage.SAMPLE]


def test_the_sample_needs_no_query(client: Client) -> None:
    counts = []
    for sample in (None, seed_usage.SAMPLE):
        run = created(client) if sample is None else Run.objects.get()
        run.checkpoints.all().delete()
        seed_usage.checkpoints(run, 4, final=True, sample=sample)
        with CaptureQueriesContext(connection) as result:
            tab(client, run)
        counts.append(len(result))
    assert counts[1] <= counts[0]
