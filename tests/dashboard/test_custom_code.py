"""The submit form for custom code: a zip, a function in it, arguments, requirements."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from runs.models import Archive, Run
from tests.dashboard.test_pool_form import LOCAL, sent
from tests.matrix import matrix

pytestmark = pytest.mark.django_db


def zipped(**files: str) -> bytes:
    created = io.BytesIO()
    with zipfile.ZipFile(created, "w") as archive:
        for name, text in (files or {"train.py": "def build(**given): ..."}).items():
            archive.writestr(name, text)
    return created.getvalue()


def custom(code: bytes | None = None, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = sent(LOCAL) | {
        "workload": "custom",
        "function": "train:build",
        "arguments": '{"width": 8}',
        "requirements": "einops==0.8\n\n  rich  ",
    }
    if code is not None:
        values["archive"] = SimpleUploadedFile("mine.zip", code, "application/zip")
    return values | changes


def test_a_run_with_custom_code(client: Client, operator_user: Any) -> None:
    code = zipped()
    response = client.post("/runs/new", custom(code))
    assert response.status_code == 302, response.context["form"].all_errors
    run = Run.objects.get()
    digest = hashlib.sha256(code).hexdigest()
    assert run.workload == {
        "kind": "custom",
        "function": "train:build",
        "arguments": {"width": 8},
        "archive": digest,
        "requirements": ["einops==0.8", "rich"],
    }
    assert run.archive is not None
    assert run.archive.sha256 == digest
    assert bytes(run.archive.data) == code
    page = client.get(reverse("run", args=[run.pk]) + "?tab=settings").content.decode()
    for text in ("train:build", digest[:16], "einops==0.8", "&quot;width&quot;: 8"):
        assert text in page
    assert "byte-level GPT" not in page


def test_code_in_the_image_needs_no_zip(client: Client, operator_user: Any) -> None:
    assert client.post("/runs/new", custom()).status_code == 302
    assert Run.objects.get().archive is None


def test_a_form_with_errors_keeps_the_zip(client: Client, operator_user: Any) -> None:
    code = zipped()
    response = client.post("/runs/new", custom(code, sync_every="0"))
    assert response.status_code == 422
    page = response.content.decode()
    digest = hashlib.sha256(code).hexdigest()
    assert f'name="archive_sha256" value="{digest}"' in page
    assert f"1 file, sha256 {digest[:12]}" in page
    assert re.search(r'value="custom" checked', page)
    again = client.post("/runs/new", custom(archive_sha256=digest))
    assert again.status_code == 302
    assert Run.objects.get().archive_id == digest


def test_other_buttons_keep_the_zip(client: Client, operator_user: Any) -> None:
    code = zipped()
    page = client.post("/runs/new", custom(code) | {"add_pool": "1"}).content.decode()
    assert f'name="archive_sha256" value="{hashlib.sha256(code).hexdigest()}"' in page


@matrix(
    ("change", "field", "output"),
    [
        ({"function": ""}, "function", "Enter a function as module:function"),
        ({"function": "train"}, "function", "expected 'package.module:function', found 'train'"),
        ({"arguments": "{"}, "arguments", "expected a JSON object"),
        ({"arguments": "[1]"}, "arguments", "expected an object, found [1]"),
        ({"arguments": "[" * 50_000}, "arguments", "expected a JSON object"),
        ({"requirements": "--index-url x"}, "requirements", "expected pip requirements"),
        ({"archive_sha256": "0" * 64}, "archive", "Choose the file again"),
    ],
    fast=3,
)
def test_errors_of_custom_code_are_shown_at_their_field(
    client: Client, operator_user: Any, change: dict[str, str], field: str, output: str
) -> None:
    response = client.post("/runs/new", custom(**change))
    assert response.status_code == 422
    errors = response.context["form"].all_errors
    assert list(errors) == [field]
    assert output in errors[field][0]
    assert not Run.objects.exists()


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (b"", "expected a zip of Python files"),
        (b"not a zip", "expected a zip of Python files"),
        (zipped(**{"../evil.py": ""}), "expected paths inside the archive"),
        (zipped(**{"readme.txt": ""}), "expected Python files, found none"),
        (b"x" * 20_000_001, "expected at most 20 MB"),
    ],
)
def test_an_upload_without_code_is_rejected_and_not_stored(
    client: Client, operator_user: Any, code: bytes, output: str
) -> None:
    response = client.post("/runs/new", custom(code))
    assert response.status_code == 422
    assert output in response.context["form"].all_errors["archive"][0]
    assert not Archive.objects.exists()


def test_the_module_must_be_in_the_zip_without_requirements(
    client: Client, operator_user: Any
) -> None:
    code = zipped(**{"mine/deep.py": "def build(): ...", "notes.txt": ""})
    response = client.post("/runs/new", custom(code, requirements=""))
    assert response.context["form"].all_errors == {
        "function": [
            "expected train.py or train/ at the top level of the zip, found mine, notes.txt"
        ]
    }
    ok = custom(code, requirements="", function="mine.deep:build")
    assert client.post("/runs/new", ok).status_code == 302
    installed = custom(zipped(**{"a.py": ""}), requirements="train==1", name="two", submit_key="2")
    assert client.post("/runs/new", installed).status_code == 302


def test_input_of_other_workloads_is_ignored(client: Client, operator_user: Any) -> None:
    assert client.post("/runs/new", custom(eval_bytes="", size="x")).status_code == 302
    values = custom(b"junk", workload="byte_gpt", arguments="{", name="two", submit_key="2")
    assert client.post("/runs/new", values).status_code == 302
    assert Run.objects.get(name="two").workload["kind"] == "byte_gpt"
    assert Run.objects.get(name="two").archive is None


def test_the_estimate_marks_unknown_figures(client: Client, operator_user: Any) -> None:
    result = client.post("/runs/estimate.json", custom()).json()["estimate"]
    for name in ("parameters", "tokens", "tokens_per_round", "total_bytes", "reduction"):
        assert result[name] is None
    assert result["rounds"] == 16
    assert result["usd_text"] == "at most $0.00 in 30m 00s, the time limit"
