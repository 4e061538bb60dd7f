"""The *Source* of the submit form: templates, clones and forks of all kinds of runs; dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from dashboard.forms import RunForm
from diloco.protocol.workload import WORKLOADS, HuggingFaceWorkload, WorkloadDocument
from runs.models import Archive, Checkpoint, Run, Webhook
from runs.submit import run_draft
from runs.submit.uploads import store_archive
from tests.browser import seed
from tests.dashboard.test_custom_code import zipped

pytestmark = pytest.mark.django_db

LLAMA = HuggingFaceWorkload(
    config={"model_type": "llama", "hidden_size": 64},
    context=64,
    data="file:///data/*.parquet",
    data_format="parquet",
    text_column="body",
    documents=100,
    eval_tokens=512,
)


def values_of(client: Client, query: str = "") -> dict[str, Any]:
    """Return the values that a browser posts for the prefilled form."""
    response = client.get(reverse("run-new") + query)
    assert response.status_code == 200
    form = response.context["form"]
    assert isinstance(form, RunForm)
    fields = [*form, *(field for pool in form.pools for field in pool)]
    return {f.html_name: v for f in fields if (v := f.value()) is not None and v is not False}


def launch(client: Client, sent: dict[str, Any]) -> Run:
    before = set(Run.objects.values_list("pk", flat=True))
    response = client.post(reverse("run-new"), sent)
    assert response.status_code == 302, response.context["form"].all_errors
    return Run.objects.exclude(pk__in=before).get()


@pytest.mark.parametrize("name", run_draft.TEMPLATES)
def test_a_template_prefills_the_form(client: Client, operator_user: Any, name: str) -> None:
    expected = run_draft.TEMPLATES[name].make()
    assert values_of(client, f"?template={name}")["name"] == expected.name
    form = RunForm(values_of(client, f"?template={name}"))
    assert form.draft() == expected, form.all_errors


def test_the_first_visit_is_the_local_demo(client: Client, operator_user: Any) -> None:
    for query in ("", "?template=nothing-like-it"):
        assert values_of(client, query)["name"] == "Local demo"
    source = client.get(reverse("run-new")).context["source"]
    assert source["kind"] == "template"
    assert (source["clone"]["options"], source["fork"]["options"]) == ([], [])


def test_a_transformers_run_is_cloned_completely(client: Client, run: Run) -> None:
    Run.objects.update(workload=LLAMA.to_dict())
    sent = values_of(client, f"?clone={run.pk}")
    assert sent["workload"] == "huggingface"
    form = RunForm(sent)
    draft = form.draft()
    assert draft is not None, form.all_errors
    assert draft.workload == LLAMA


class ToyWorkload(WorkloadDocument):
    kind = "toy"


def test_a_kind_that_the_form_does_not_offer_is_shown_but_not_cloned_there(
    client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "toy", ToyWorkload)
    Run.objects.update(workload={"kind": "toy"})
    page = reverse("run", args=[run.pk])
    assert "<dt><code>kind</code></dt>" in client.get(f"{page}?tab=settings").content.decode()
    response = client.get(f"{reverse('run-new')}?clone={run.pk}", follow=True)
    assert response.redirect_chain == [(page, 302)]
    assert "The form has no fields for workloads of kind toy" in response.content.decode()


def test_model_errors_are_shown_at_their_field(client: Client, run: Run) -> None:
    Run.objects.update(workload=LLAMA.to_dict())
    sent = values_of(client, f"?clone={run.pk}")
    for change, field, output in (
        ({"config": ""}, "model", "expected either a model or a configuration, found neither"),
        ({"model": "a/b"}, "model", "found both"),
        ({"config": "{"}, "config", "expected a JSON object"),
        ({"config": "{}", "model": "a/b", "context": "0"}, "context", "greater than or equal to 1"),
        ({"data": ""}, "data", "Enter a URI"),
    ):
        form = RunForm(sent | change)
        assert form.draft() is None
        assert list(form.all_errors) == [field]
        assert output in form.all_errors[field][0]


def test_custom_code_is_cloned_with_its_zip(client: Client, run: Run) -> None:
    code = store_archive(zipped())
    assert code is not None
    workload = {
        "kind": "custom",
        "function": "train:build",
        "arguments": {"width": 8},
        "archive": code.pk,
        "requirements": ["einops==0.8"],
    }
    Run.objects.update(workload=workload, archive=code)
    page = client.get(reverse("run-new") + f"?clone={run.pk}").content.decode()
    assert f"Uploaded: 1 file, sha256 {code.pk[:12]}" in page
    created = launch(client, values_of(client, f"?clone={run.pk}"))
    assert (created.workload, created.archive) == (workload, code)


def test_a_clone_without_its_zip_is_reported(client: Client, run: Run) -> None:
    workload = {
        "kind": "custom",
        "function": "train:build",
        "arguments": {},
        "archive": "0" * 64,
        "requirements": [],
    }
    Run.objects.update(workload=workload)
    response = client.post(reverse("run-new"), values_of(client, f"?clone={run.pk}"))
    assert "Choose the file again" in response.context["form"].all_errors["archive"][0]
    assert not Archive.objects.exists()


def test_a_clone_keeps_advanced_settings(client: Client, run: Run) -> None:
    hooks = [
        Webhook.objects.create(
            name=name, url="https://example.org", kinds=["finished"], created_at=timezone.now()
        )
        for name in ("pager", "chat")
    ]
    run.pools.update(options={"nice": 5}, max_price_usd_h=1.5)
    Run.objects.update(notify=[hooks[0].pk])
    sent = values_of(client, f"?clone={run.pk}")
    draft = RunForm(sent).draft()
    assert draft is not None
    assert draft.pools[0].options == {"nice": 5}
    assert draft.pools[0].max_price_usd_h == 1.5
    assert draft.notify == (hooks[0].pk,)
    page = client.get(reverse("run-new") + f"?clone={run.pk}").content.decode()
    assert "&quot;nice&quot;: 5" in page
    all_chosen = RunForm(sent | {"notify": [str(hook.pk) for hook in hooks]}).draft()
    assert all_chosen is not None
    assert all_chosen.notify is None
    none_chosen = RunForm({k: v for k, v in sent.items() if k != "notify"}).draft()
    assert none_chosen is not None
    assert none_chosen.notify == ()


def test_a_price_above_the_limit_is_rejected_at_its_field(
    client: Client, operator_user: Any
) -> None:
    sent = values_of(client) | {"pools.0.price_usd_h": "2", "pools.0.max_price_usd_h": "1.5"}
    response = client.post(reverse("run-new"), sent)
    [(field, output)] = response.context["form"].all_errors.items()
    assert (field, output) == (
        "pools.0.max_price_usd_h",
        ["expected cpu for at most $1.5 an hour, found $2"],
    )
    launch(client, sent | {"pools.0.max_price_usd_h": "2"})
    for wrong in ("{", "[1]"):
        form = RunForm(sent | {"pools.0.options": wrong})
        assert form.draft() is None
        assert "expected a JSON object" in form.all_errors["pools.0.options"][0]


def test_source_redirects_to_the_equivalent_url(client: Client, run: Run) -> None:
    parameters = {
        "source": "fork",
        "template": "local",
        "clone": "x",
        "fork": str(run.pk),
        "round": "5",
    }
    for change, query in (
        ({}, f"fork={run.pk}&round=5"),
        ({"round": ""}, f"fork={run.pk}"),
        ({"source": "template"}, "template=local"),
        ({"source": "clone", "clone": ""}, ""),
        ({"source": "//evil.example"}, ""),
    ):
        response = client.get(reverse("run-new"), parameters | change)
        assert (response.status_code, response["Location"]) == (302, f"/runs/new?{query}")


def names(choice: dict[str, Any]) -> list[str]:
    return [label.rpartition(" · ")[0] for _, label in choice["options"]]


def test_only_runs_with_a_checkpoint_can_be_forked(client: Client, run: Run) -> None:
    seed.run(run.owner, name="Second", committed=0)
    Checkpoint.objects.create(
        run=run, round=5, key="k", size_bytes=1, digest="d", created_at=timezone.now()
    )
    source = client.get(reverse("run-new") + f"?clone={run.pk}").context["source"]
    assert names(source["clone"]) == ["Second · 0 rounds", "First · 12 rounds"]
    assert names(source["fork"]) == ["First · 12 rounds"]
    assert (source["kind"], source["chosen"]) == ("clone", str(run.pk))


def test_the_number_of_queries_of_the_form_is_constant(
    client: Client, operator_user: Any, django_assert_max_num_queries: Any
) -> None:
    for n in range(3):
        seed.run(operator_user, name=f"Run {n}", committed=1)
    with django_assert_max_num_queries(22):
        client.get(reverse("run-new"))


# Dry run.


def test_a_dry_run_shows_the_run_and_creates_nothing(
    client: Client, operator_user: Any, tmp_path: Path
) -> None:
    sent = values_of(client) | {"name": "Only tried", "dry_run": "1"}
    response = client.post(reverse("run-new"), sent)
    page = response.content.decode()
    assert response.status_code == 200
    assert "Dry run passed: backends, bucket and data are ready" in page
    assert "4 × local cpu" in page
    # Next to the form, in its command line, and in the dry run.
    assert page.count("&quot;sync_every&quot;: 90") == 3
    assert 'value="Only tried"' in page
    assert not Run.objects.exists()
    assert not [path for path in (tmp_path / "rendezvous").rglob("*") if path.is_file()]
    del sent["dry_run"]
    assert launch(client, sent).name == "Only tried"


def test_a_dry_run_shows_the_errors_of_a_launch(
    client: Client, operator_user: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    wrong = {"rendezvous": f"{tmp_path}/file/run"}
    for change, field in (({"sync_every": "0"}, "sync_every"), (wrong, "rendezvous")):
        response = client.post(reverse("run-new"), values_of(client) | {"dry_run": "1"} | change)
        assert response.status_code == 422
        assert list(response.context["form"].all_errors) == [field]
        assert "Dry run passed" not in response.content.decode()
    assert not Run.objects.exists()


def test_viewers_have_neither_source_nor_dry_run(client: Client) -> None:
    client.force_login(seed.user("vera", "viewer"))
    assert client.get(reverse("run-new")).status_code == 403
    assert client.post(reverse("run-new"), {"dry_run": "1"}).status_code == 403


def test_enter_triggers_a_dry_run(client: Client, operator_user: Any) -> None:
    """Enter presses the first submit button of a form."""
    page = client.get(reverse("run-new")).content.decode()
    form = page[page.index("data-submit") :]
    assert form[form.index('type="submit"') :].startswith('type="submit" name="dry_run"')
