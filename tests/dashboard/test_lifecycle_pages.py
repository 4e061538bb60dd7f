"""Lifecycle actions on the run page: buttons, messages and forms."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from dashboard.forms import RunForm
from runs.models import Checkpoint, Run
from tests.browser import seed
from tests.dashboard.page_harness import KINDS, client_for

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(client: Client) -> Run:
    operator_user = seed.user("owner", "operator")
    client.force_login(operator_user)
    return seed.run(operator_user, committed=2, replicas=2)


def post(client: Client, run: Run, what: str, **body: Any) -> str:
    response = client.post(reverse(f"run-{what}", args=[run.pk]), body, follow=True)
    run.refresh_from_db()
    return " ".join(str(message) for message in response.context["messages"])


def page(client: Client, run: Run) -> str:
    return client.get(reverse("run", args=[run.pk])).content.decode()


def shown(client: Client, run: Run) -> set[str]:
    """Actions with a visible button."""
    text = page(client, run).partition("<dialog")[0]
    forms = re.findall(r'action="[^"]*/(\w+)"[^>]*>.*?<button([^>]*)>', text, re.DOTALL)
    return {name for name, attributes in forms if not re.search(r"\bhidden\b", attributes)}


def whole_checkpoint(run: Run, round: int) -> None:
    from django.utils import timezone

    Checkpoint.objects.get_or_create(
        run=run,
        round=round,
        final=False,
        defaults={"key": "k", "size_bytes": 1, "digest": "d", "created_at": timezone.now()},
    )


def test_pause_and_resume(client: Client, run: Run) -> None:
    assert {"pause", "save", "stop"} <= shown(client, run)
    assert "it costs nothing" in post(client, run, "pause")
    assert run.state == "pausing"
    assert {"pause", "resume", "save"} & shown(client, run) == set()
    assert "still being released" in post(client, run, "resume")
    Run.objects.update(state="paused")
    run.refresh_from_db()
    assert {"resume", "stop"} <= shown(client, run)
    assert "resuming" in post(client, run, "resume")
    assert run.state == "queued"


def test_resume_is_offered_for_failed_runs_without_final_weights(client: Client, run: Run) -> None:
    Checkpoint.objects.filter(final=True).delete()
    Run.objects.update(state="failed")
    run.refresh_from_db()
    assert "resume" in shown(client, run)
    assert "stop" not in shown(client, run)
    whole_checkpoint(run, 1)
    Checkpoint.objects.filter(round=1).update(final=True)
    assert "resume" not in shown(client, run)
    assert "fork a new run" in post(client, run, "resume")
    assert run.state == "failed"


def test_save_shows_a_message(client: Client, run: Run) -> None:
    assert "saved as a checkpoint" in post(client, run, "save")
    assert run.save_requested_at is not None


def test_stop_offers_force(client: Client, run: Run) -> None:
    post(client, run, "stop")
    assert (run.state, run.cancel_at) == ("stopping", None)
    assert "stop" in shown(client, run)
    post(client, run, "stop", force="1")
    assert run.cancel_at is not None
    assert "is already" in post(client, run, "stop", force="1")


def test_notes_and_tags_are_shown_as_text(client: Client, run: Run) -> None:
    post(client, run, "describe", notes="<b>why</b>\r\nso", tags="baseline, h-90")
    assert run.tags == ["baseline", "h-90"]
    text = page(client, run)
    assert "&lt;b&gt;why&lt;/b&gt;<br>so" in text
    assert 'q=tag:h-90" title="Runs with this tag">h-90</a>' in text
    assert "expected tags" in post(client, run, "describe", notes="", tags="x" * 41)
    assert run.tags == ["baseline", "h-90"]
    viewer = page(client_for("viewer", run.owner), run)
    assert "baseline" in viewer
    assert "run-notes" not in viewer


def test_archived_runs_are_hidden_unless_queried(client: Client, run: Run) -> None:
    assert "expected a run that is over" in post(client, run, "archive", archived="1")
    Run.objects.update(state="succeeded")
    assert "lists hide it" in post(client, run, "archive", archived="1")
    assert str(run.pk) not in client.get(reverse("runs")).content.decode()
    assert client.get(reverse("runs-json")).json()["runs"] == []
    assert str(run.pk) in client.get(reverse("runs") + "?q=is:archived").content.decode()
    assert "Archived on" in page(client, run)
    assert "restored to the list" in post(client, run, "archive", archived="")
    assert str(run.pk) in client.get(reverse("runs")).content.decode()


def test_delete_requires_the_name_and_keeps_the_input(client: Client, run: Run) -> None:
    Run.objects.update(state="failed")
    url = reverse("run-delete", args=[run.pk])
    response = client.post(url, {"name": "wrong", "objects": "1"})
    assert response.status_code == 422
    text = response.content.decode()
    assert "Expected the name of the run" in text
    assert 'name="objects" value="1" checked' in text
    response = client.post(url, {"name": run.name})
    assert response["Location"] == reverse("runs")
    run.refresh_from_db()
    assert (run.delete_requested_at is not None, run.delete_objects) == (True, False)


@pytest.mark.parametrize("kind", KINDS)
def test_delete_permissions(kind: str, run: Run) -> None:
    Run.objects.update(state="failed")
    client_for(kind, run.owner).post(reverse("run-delete", args=[run.pk]), {"name": run.name})
    run.refresh_from_db()
    assert (run.delete_requested_at is not None) == (kind in ("owner", "admin"))


@pytest.mark.parametrize("kind", ["viewer", "owner", "stranger", "admin"])
def test_the_menu_depends_on_permissions(kind: str, run: Run) -> None:
    whole_checkpoint(run, 1)
    text = page(client_for(kind, run.owner), run)
    assert (f"?clone={run.pk}" in text) == (kind != "viewer")
    assert (f"?fork={run.pk}" in text) == (kind != "viewer")
    for what in ("pause", "save", "archive", "delete", "describe"):
        assert (f"/{what}" in text) == (kind in ("owner", "admin")), what


def test_the_menu_explains_clone_and_fork(client: Client, run: Run) -> None:
    Checkpoint.objects.all().delete()
    clone = "<b>Clone</b><small>New run from scratch; change any setting</small>"
    fork = "<b>Fork</b><small>New run from these weights; change settings</small>"
    text = page(client, run)
    assert clone in text
    assert fork not in text  # there are no weights
    whole_checkpoint(run, 1)
    text = page(client, run)
    assert clone in text
    assert fork in text


# The submit form, prefilled from a run.


def form_of(client: Client, query: str) -> RunForm:
    response = client.get(reverse("run-new") + query)
    assert response.status_code == 200
    form = response.context["form"]
    assert isinstance(form, RunForm)
    return form


def test_clone_prefills_the_form(client: Client, run: Run) -> None:
    Run.objects.update(group_settings=run.group_settings | {"inner_lr": 0.00123})
    form = form_of(client, f"?clone={run.pk}")
    assert form["name"].value() == "Local demo (copy)"
    assert float(form["inner_lr"].value()) == 0.00123
    assert form.pools[0]["count"].value() == 2
    assert form.origin is None


def test_fork_offers_the_rounds_with_checkpoints(client: Client, run: Run) -> None:
    Checkpoint.objects.all().delete()
    for round in (0, 5, 10):
        whole_checkpoint(run, round)
    form = form_of(client, f"?fork={run.pk}")
    assert form.origin == run
    assert [value for value, _ in form.fields["fork_round"].choices] == [10, 5]
    assert form["fork_round"].value() == 10
    assert form_of(client, f"?fork={run.pk}&round=5")["fork_round"].value() == 5
    text = client.get(reverse("run-new") + f"?fork={run.pk}&round=0").content.decode()
    assert "Round 0 has no checkpoint" in text
    assert "Starts with the weights of" in text


def test_fork_without_a_checkpoint_falls_back_to_clone(client: Client, run: Run) -> None:
    Checkpoint.objects.all().delete()
    assert form_of(client, f"?fork={run.pk}").origin is None


@pytest.mark.parametrize("query", ["?clone=x", f"?fork={uuid.UUID(int=0)}"])
def test_an_unknown_run_cannot_be_cloned(client: Client, run: Run, query: str) -> None:
    assert client.get(reverse("run-new") + query).status_code == 404


def test_submitting_a_fork_starts_from_its_checkpoint(
    client: Client, run: Run, tmp_path: Path
) -> None:
    Checkpoint.objects.all().delete()
    whole_checkpoint(run, 5)
    form = form_of(client, f"?fork={run.pk}")
    sent = {field.html_name: field.value() for field in form if field.value() not in (None, False)}
    for pool in form.pools:
        sent |= {f.html_name: f.value() for f in pool if f.value() not in (None, False)}
    sent["rendezvous"] = str(tmp_path / "fork")
    wrong = client.post(reverse("run-new"), sent | {"size": "mini"})
    assert wrong.status_code == 422
    assert "expected &#x27;demo&#x27; as in" in wrong.content.decode()
    response = client.post(reverse("run-new"), sent)
    assert response.status_code == 302, response.context["form"].all_errors
    fork = Run.objects.exclude(pk=run.pk).get()
    assert (fork.forked_from, fork.fork_round, fork.fork_outer) == (run.pk, 5, True)
    assert run.name in page(client, fork)
    Run.objects.filter(pk=run.pk).delete()
    assert "a deleted run" in page(client, fork)
    assert User.objects.count() == 1


def test_the_delete_page_lists_deleted_and_kept_objects(
    client: Client, run: Run, tmp_path: Path
) -> None:
    from diloco.protocol.ownership import mark
    from diloco.store.base import LocalStore

    store = LocalStore(tmp_path / "run")
    mark(store, str(run.pk))
    store.put("control/00000001.json", b"x" * 2000)
    store.put("code/<b>mine.py", b"mine")
    Run.objects.update(rendezvous=store.uri, state="failed")
    page = client.get(reverse("run-delete", args=[run.pk])).content.decode()
    assert "2 objects" in page
    assert "1 control" in page
    assert "1 other object" in page
    assert "code/&lt;b&gt;mine.py" in page
    Run.objects.update(rendezvous="s3://b/with a credential that is gone")
    assert client.get(reverse("run-delete", args=[run.pk])).status_code == 200
