"""The submit form for somebody's own code: a zip, a function in it, arguments, requirements."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from runs.models import Archive, Run
from tests.dashboard.test_pool_form import LOCAL, sent

pytestmark = pytest.mark.django_db


@pytest.fixture
def olga(olga: Any, settings: Any, tmp_path: Path) -> Any:
    settings.DEFAULT_RENDEZVOUS = (tmp_path / "rendezvous").as_uri()
    return olga


def zipped(**files: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in (files or {"train.py": "def build(**given): ..."}).items():
            archive.writestr(name, text)
    return made.getvalue()


def custom(code: bytes | None = None, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = sent(LOCAL) | {
        "workload": "custom", "function": "train:build", "arguments": '{"width": 8}',
        "requirements": "einops==0.8\n\n  rich  ",
    }  # fmt: skip
    if code is not None:
        values["archive"] = SimpleUploadedFile("mine.zip", code, "application/zip")
    return values | changes


def test_a_run_of_my_own_code(client: Client, olga: Any) -> None:
    code = zipped()
    answer = client.post("/runs/new", custom(code))
    assert answer.status_code == 302, answer.context["form"].all_errors
    run = Run.objects.get()
    digest = hashlib.sha256(code).hexdigest()
    assert run.workload == {
        "kind": "custom", "function": "train:build", "arguments": {"width": 8},
        "archive": digest, "requirements": ["einops==0.8", "rich"],
    }  # fmt: skip
    assert run.archive is not None
    assert run.archive.sha256 == digest
    assert bytes(run.archive.data) == code
    page = client.get(reverse("run", args=[run.pk]) + "?tab=settings").content.decode()
    for text in ("train:build", digest[:16], "einops==0.8", "&quot;width&quot;: 8"):
        assert text in page
    assert "byte-level GPT" not in page


def test_code_that_the_image_has_needs_no_zip(client: Client, olga: Any) -> None:
    assert client.post("/runs/new", custom()).status_code == 302
    assert Run.objects.get().archive is None


def test_a_form_that_comes_back_keeps_the_zip(client: Client, olga: Any) -> None:
    code = zipped()
    answer = client.post("/runs/new", custom(code, sync_every="0"))
    assert answer.status_code == 422
    page = answer.content.decode()
    digest = hashlib.sha256(code).hexdigest()
    assert f'name="archive_sha256" value="{digest}"' in page
    assert f"1 file, sha256 {digest[:12]}" in page
    assert re.search(r'value="custom" checked', page)
    again = client.post("/runs/new", custom(archive_sha256=digest))
    assert again.status_code == 302
    assert Run.objects.get().archive_id == digest


def test_it_is_kept_by_the_buttons_that_do_not_launch_too(client: Client, olga: Any) -> None:
    code = zipped()
    page = client.post("/runs/new", custom(code) | {"add_pool": "1"}).content.decode()
    assert f'name="archive_sha256" value="{hashlib.sha256(code).hexdigest()}"' in page


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"function": ""}, "function", "expected module:function, found none"),
        ({"function": "train"}, "function", "expected 'package.module:function', found 'train'"),
        ({"arguments": "{"}, "arguments", "expected a JSON object"),
        ({"arguments": "[1]"}, "arguments", "expected an object, found [1]"),
        ({"arguments": "[" * 50_000}, "arguments", "expected a JSON object"),
        ({"requirements": "--index-url x"}, "requirements", "expected pip requirements"),
        ({"archive_sha256": "0" * 64}, "archive", "choose it again"),
    ],
)
def test_what_is_wrong_stands_at_its_field(
    client: Client, olga: Any, change: dict[str, str], field: str, said: str
) -> None:
    answer = client.post("/runs/new", custom(**change))
    assert answer.status_code == 422
    errors = answer.context["form"].all_errors
    assert list(errors) == [field]
    assert said in errors[field][0]
    assert not Run.objects.exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"", "expected a zip of Python files"),
        (b"not a zip", "expected a zip of Python files"),
        (zipped(**{"../evil.py": ""}), "expected paths inside the archive"),
        (zipped(**{"readme.txt": ""}), "expected Python files, found none"),
        (b"x" * 20_000_001, "expected at most 20 MB"),
    ],
)
def test_an_upload_that_is_no_code_is_refused_and_not_kept(
    client: Client, olga: Any, code: bytes, said: str
) -> None:
    answer = client.post("/runs/new", custom(code))
    assert answer.status_code == 422
    assert said in answer.context["form"].all_errors["archive"][0]
    assert not Archive.objects.exists()


def test_the_module_has_to_be_in_the_zip_unless_something_else_brings_it(
    client: Client, olga: Any
) -> None:
    code = zipped(**{"mine/deep.py": "def build(): ...", "notes.txt": ""})
    answer = client.post("/runs/new", custom(code, requirements=""))
    assert answer.context["form"].all_errors == {
        "function": ["expected train.py or train/ at the top of the zip, found mine, notes.txt"]
    }
    ok = custom(code, requirements="", function="mine.deep:build")
    assert client.post("/runs/new", ok).status_code == 302
    installed = custom(zipped(**{"a.py": ""}), requirements="train==1", name="two", submit_key="2")
    assert client.post("/runs/new", installed).status_code == 302


def test_what_is_typed_for_the_other_kind_does_not_matter(client: Client, olga: Any) -> None:
    assert client.post("/runs/new", custom(eval_bytes="", size="x")).status_code == 302
    values = custom(b"junk", workload="byte_gpt", arguments="{", name="two", submit_key="2")
    assert client.post("/runs/new", values).status_code == 302
    assert Run.objects.get(name="two").workload["kind"] == "byte_gpt"
    assert Run.objects.get(name="two").archive is None


def test_the_estimate_says_what_it_cannot_know(client: Client, olga: Any) -> None:
    found = client.post("/runs/estimate.json", custom()).json()["estimate"]
    for name in ("parameters", "tokens", "tokens_per_round", "total_bytes", "reduction"):
        assert found[name] is None
    assert found["rounds"] == 16
    assert found["usd_text"] == "at most $0.00 in 30m 00s, the time limit"
