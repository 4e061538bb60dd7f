"""The sample of text on the Checkpoints tab: what is said before, without, and with one."""

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

HEADING = "A sample of text"


def made(client: Client, *, state: str = "succeeded", kind: str = "") -> Run:
    olga = seed.user("olga", "operator")
    client.force_login(olga)
    run: Run = seed.run(olga, committed=4, replicas=2, state=state)
    if kind:
        run.workload = {**run.workload, "kind": kind}
        run.save()
    return run


def tab(client: Client, run: Run) -> str:
    return client.get(reverse("run-checkpoints", args=[run.pk])).content.decode()


def test_before_the_end_it_says_when_there_will_be_one(client: Client) -> None:
    run = made(client, state="running")
    text = tab(client, run)
    assert HEADING in text and "When the run has finished" in text
    assert "diloco.generate" not in text, "there are no weights yet"
    seed_usage.checkpoints(run, 0, 4)
    assert f"python -m diloco.generate {run.rendezvous}" in tab(client, run)


def test_text_is_shown_as_text_with_what_made_it(client: Client) -> None:
    run = made(client)
    seed_usage.checkpoints(run, 4, final=True, sample=seed_usage.SAMPLE)
    text = tab(client, run)
    assert "round 20, temperature 0.7, seed 0" in text
    assert "<b>def </b>test_count(self):\n" in text
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in text and "<b>a & b</b>" not in text
    assert "time was over" not in text and "the start of a line" not in text
    assert f"python -m diloco.generate {run.rendezvous} --seed 1" in text
    page = client.get(reverse("run", args=[run.pk]) + "?tab=checkpoints").content.decode()
    assert "test_count(self)" in page


def test_a_sample_that_was_broken_off_and_begins_a_line_says_so(client: Client) -> None:
    run = made(client)
    sample = {**seed_usage.SAMPLE, "prompt": "", "whole": False}
    seed_usage.checkpoints(run, 4, final=True, sample=sample)
    text = tab(client, run)
    assert "the start of a line, as far as they came before time was over" in text
    assert "<b></b>" not in text
    assert ">\n" + seed_usage.SAMPLE["text"][:9] in text, "a browser drops the first end of a line"


@pytest.mark.parametrize(
    ("state", "final", "open_job", "words"),
    [
        ("succeeded", True, False, "The final weights came without one"),
        ("succeeded", True, True, "a replica may still be drawing a sample"),
        ("failed", False, False, "The run ended without final weights"),
    ],
)
def test_what_is_said_without_one(
    client: Client, state: str, final: bool, open_job: bool, words: str
) -> None:
    run = made(client, state=state)
    seed_usage.checkpoints(run, 4, final=final)
    ReplicaAttempt.objects.create(
        replica=run.replicas.get(number=0), number=1, launch_key=f"{run.pk}-0-1",
        created_at=run.created_at, ended_at=None if open_job else run.created_at,
    )  # fmt: skip
    assert words in tab(client, run)


def test_a_workload_of_ones_own_has_no_such_place(client: Client) -> None:
    run = made(client, kind="custom")
    seed_usage.checkpoints(run, 4, final=True)
    assert HEADING not in tab(client, run)


def test_the_command_is_one_that_can_read_the_workload(client: Client) -> None:
    run = made(client, kind="huggingface")
    seed_usage.checkpoints(run, 4, final=True)
    text = tab(client, run)
    assert f"python -m diloco.export {run.rendezvous} model" in text
    assert "diloco.generate" not in text


def test_who_sees_the_run_sees_the_sample_and_nobody_else(client: Client) -> None:
    run = made(client)
    seed_usage.checkpoints(run, 4, final=True, sample=seed_usage.SAMPLE)
    address = reverse("run-checkpoints", args=[run.pk])
    for name, role in (("vera", "viewer"), ("otto", "operator")):
        client.force_login(seed.user(name, role))
        assert "test_count(self)" in client.get(address).content.decode()
    client.logout()
    answer = client.get(address)
    assert answer.status_code in (302, 401, 403) and b"test_count" not in answer.content


def test_the_program_sees_it_too(client: Client) -> None:
    run = made(client)
    seed_usage.checkpoints(run, 4, final=True, sample=seed_usage.SAMPLE)
    rows: list[dict[str, Any]] = client.get(f"/api/runs/{run.pk}/checkpoints").json()
    assert [row["sample"] for row in rows] == [None, seed_usage.SAMPLE]


def test_it_costs_no_query(client: Client) -> None:
    counts = []
    for sample in (None, seed_usage.SAMPLE):
        run = made(client) if sample is None else Run.objects.get()
        run.checkpoints.all().delete()
        seed_usage.checkpoints(run, 4, final=True, sample=sample)
        with CaptureQueriesContext(connection) as found:
            tab(client, run)
        counts.append(len(found))
    assert counts[1] <= counts[0]
