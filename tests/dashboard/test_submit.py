"""The submit form: prefilled, validated per field, one run per form."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from dashboard.forms.run import DERIVED
from diloco.protocol.settings import setting_fields
from diloco.protocol.workload import GPT_SIZES
from runs.models import Run
from runs.submit import run_draft
from tests.browser import seed
from tests.matrix import matrix

pytestmark = pytest.mark.django_db


def filled(client: Client) -> dict[str, str]:
    """Return the form that a browser posts when the user only presses Launch."""
    page = client.get("/runs/new").content.decode()
    page = re.sub(r"<template.*?</template>", "", page, flags=re.DOTALL)
    sent = {}
    for tag in re.findall(r"<input[^>]*>", page):
        attrs = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if attrs.get("type") in ("radio", "checkbox") and " checked" not in tag:
            continue
        if "name" in attrs and attrs["name"] != "csrfmiddlewaretoken":
            sent[attrs["name"]] = html.unescape(attrs.get("value", ""))
    for name, body in re.findall(r'<select name="([\w.]+)"[^>]*>(.*?)</select>', page, re.DOTALL):
        chosen = re.search(r'value="([^"]*)"[^>]* selected', body)
        sent[name] = chosen[1] if chosen else re.search(r'value="([^"]*)"', body)[1]  # type: ignore[index]
    return sent


def test_the_form_starts_with_the_local_demo(client: Client, operator_user: Any) -> None:
    response = client.post("/runs/new", filled(client))
    run = Run.objects.get()
    assert response["Location"] == f"/runs/{run.pk}/"
    demo = run_draft.local_demo()
    assert run.group_settings == demo.settings.to_dict()
    assert run.workload == demo.workload.to_dict()
    assert run.time_limit_s == demo.time_limit_s
    assert run.replicas.count() == demo.settings.num_replicas


def test_an_operator_without_permission_for_this_machine_starts_on_another_backend(
    client: Client, operator_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert filled(client)["pools.0.backend"] == "local"
    monkeypatch.setattr("dashboard.forms.pools.can_use_local", lambda user: False)
    sent = filled(client)
    backend = sent["pools.0.backend"]
    assert backend != "local"
    assert sent["pools.0.hardware"].startswith(f"{backend}:")


def test_without_permission_for_this_machine_the_form_asks_for_a_bucket(
    client: Client, operator_user: Any, settings: Any
) -> None:
    page = client.get("/runs/new").content.decode()
    assert "ready to launch" in page
    assert "s-bucket" not in filled(client)["open"].split()
    settings.OPERATORS_LOCAL = "none"
    page = client.get("/runs/new").content.decode()
    assert "ready to launch" not in page
    assert "choose a backend with its credential, and a bucket" in page
    assert "s-bucket" in filled(client)["open"].split()
    settings.DEFAULT_RENDEZVOUS = "s3://bucket/runs"
    assert "and a bucket" not in client.get("/runs/new").content.decode()
    assert "s-bucket" not in filled(client)["open"].split()


def test_every_setting_has_a_field_with_label_help_and_unit(
    client: Client, operator_user: Any
) -> None:
    page = client.get("/runs/new").content.decode()
    for spec in setting_fields():
        if spec.name in DERIVED:
            continue  # set by the pools and the start policy
        assert f'name="{spec.name}"' in page
        assert html.escape(spec.label) in page
        assert html.escape(spec.help) in page


def test_sizes_show_their_parameters(client: Client, operator_user: Any) -> None:
    page = client.get("/runs/new").content.decode()
    for name, shape in GPT_SIZES.items():
        assert f'value="{name}"' in page
        assert f"context {shape.context}" in page


@pytest.mark.parametrize("rendezvous", ["", "mine"])
def test_a_double_click_creates_one_run(
    client: Client, operator_user: Any, tmp_path: Path, rendezvous: str
) -> None:
    sent = filled(client) | {"rendezvous": str(tmp_path / rendezvous) if rendezvous else ""}
    first = client.post("/runs/new", sent)
    second = client.post("/runs/new", sent)
    assert first["Location"] == second["Location"]
    assert Run.objects.count() == 1


def test_a_form_that_was_launched_is_not_restored(
    client: Client, operator_user: Any, tmp_path: Path
) -> None:
    sent = filled(client) | {"name": "Kept in the browser"}
    assert (
        "Kept in the browser" in client.post("/runs/new", sent | {"restore": "1"}).content.decode()
    )
    client.post("/runs/new", sent)
    response = client.post("/runs/new", sent | {"restore": "1"})
    assert response["Location"] == "/runs/new"
    assert Run.objects.count() == 1


def test_long_input_reaches_the_server(client: Client, operator_user: Any) -> None:
    """``maxlength`` would make the browser cut pasted text without notice."""
    pages = [client.get("/runs/new"), client.get("/")]
    assert [b"maxlength" in page.content for page in pages] == [False, False]
    response = client.post("/runs/new", filled(client) | {"name": "x" * 90})
    assert f'value="{"x" * 90}"' in response.content.decode()


def test_each_visit_creates_a_new_run(client: Client, operator_user: Any) -> None:
    assert filled(client)["submit_key"] != filled(client)["submit_key"]


@matrix(
    ("change", "field", "output"),
    [
        ({"sync_every": "0"}, "sync_every", "expected 1 or more, found 0"),
        ({"sync_every": "1.5"}, "sync_every", "whole number"),
        ({"outer_lr": "nan"}, "outer_lr", "number"),
        ({"outer_lr": ""}, "outer_lr", "required"),
        ({"codec": "zip"}, "codec", "zip is not one of the available choices"),
        ({"min_quorum": "9"}, "min_quorum", "at most the target of 4 replicas, found 9"),
        ({"mean_codec": "int8", "reduce_plan": "gather"}, "mean_codec", "gather stores no mean"),
        ({"max_replicas": "2"}, "max_replicas", "at least the target of 4 replicas, found 2"),
        ({"warmup_steps": "100000"}, "warmup_steps", "inner steps of the whole run"),
        ({"round_timeout_s": "5"}, "round_timeout_s", "more than the heartbeat timeout"),
        ({"pools.0.count": "0"}, "pools.0.count", "greater than or equal to 1"),
        ({"name": " "}, "name", "required"),
        ({"name": "x" * 81}, "name", "Enter at most 80 characters, not 81."),
        ({"pools.0.region": "x" * 65}, "pools.0.region", "Enter at most 64 characters, not 65."),
        ({"size": "giant"}, "size", "giant is not one of the available choices"),
        ({"data_source": "uri"}, "data", "Enter a URI of text files"),
        ({"data_source": "uri", "data": "/no/such/text"}, "data", "/no/such/text"),
        ({"rendezvous": "not-a-place"}, "rendezvous", "not-a-place"),
        (
            {"time_limit_s": "30"},
            "time_limit_s",
            "Enter a duration such as 90m or 2h 30m, not '30'",
        ),
    ],
    fast=6,
)
def test_errors_are_shown_at_their_field_and_input_is_kept(
    client: Client, operator_user: Any, change: dict[str, str], field: str, output: str
) -> None:
    sent = filled(client) | {"name": "Kept & safe"} | change
    response = client.post("/runs/new", sent)
    assert response.status_code == 422
    assert not Run.objects.exists()
    errors = response.context["form"].all_errors
    assert list(errors) == [field]
    assert output in errors[field][0]
    page = response.content.decode()
    assert "Nothing was launched" in page
    if change.get("name") is None:
        assert 'value="Kept &amp; safe"' in page
    if field not in ("size",):
        tag = re.search(rf'<(?:input|select)[^>]*name="{re.escape(field)}"[^>]*>', page)
        assert tag is not None
        assert 'aria-invalid="true"' in tag[0]
        assert f"id_{field}_error" in tag[0]
    assert f'id="id_{field}_error"' in page


def test_an_unwritable_rendezvous_is_reported_at_its_field(
    client: Client, operator_user: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    response = client.post("/runs/new", filled(client) | {"rendezvous": f"{tmp_path}/file/run"})
    assert response.status_code == 422
    assert list(response.context["form"].all_errors) == ["rendezvous"]


def test_a_relative_rendezvous_creates_no_folder(
    client: Client, operator_user: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert client.post("/runs/new", filled(client) | {"rendezvous": "here"}).status_code == 422
    assert list(tmp_path.iterdir()) == []


def test_the_rendezvous_of_another_run_is_rejected(
    client: Client, operator_user: Any, tmp_path: Path
) -> None:
    wanted = {"rendezvous": str(tmp_path / "mine")}
    client.post("/runs/new", filled(client) | wanted)
    response = client.post("/runs/new", filled(client) | wanted)
    assert list(response.context["form"].all_errors) == ["rendezvous"]
    assert Run.objects.count() == 1


def test_the_form_key_of_another_user_starts_nothing(client: Client, operator_user: Any) -> None:
    sent = filled(client)
    client.post("/runs/new", sent)
    client.force_login(seed.user("oscar", "operator"))
    response = client.post("/runs/new", sent)
    assert response.status_code == 422
    assert Run.objects.count() == 1


def test_the_estimate_returns_numbers_or_errors(client: Client, operator_user: Any) -> None:
    sent = filled(client)
    response = client.post("/runs/estimate.json", sent).json()
    assert response["errors"] == {}
    assert response["estimate"]["parameters"] == GPT_SIZES["demo"].parameters
    response = client.post("/runs/estimate.json", sent | {"min_quorum": "9"}).json()
    assert response["estimate"] is None
    assert list(response["errors"]) == ["min_quorum"]
