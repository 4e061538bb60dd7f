"""Uploads of checkpoints to the Hub, through its real client and over HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from huggingface_hub import ModelCard

from diloco.protocol import keys
from diloco.protocol.records import FinalManifest, StoredObject
from diloco.store.base import Store
from runs.credentials import vault
from runs.exceptions import ActionRefused
from runs.export import hub_upload
from runs.ingest.stores import store_for
from runs.models import Checkpoint, Credential, Evaluation, EvaluationPlan, Event, Run
from tests.model_hub import REPO, TOKEN, ModelHub, running_model_hub
from tests.runs.run_harness import identity

pytestmark = pytest.mark.django_db

WEIGHTS = bytes(range(256)) * 100_000  # more than one piece
CONFIG = b'{"model_type": "gpt2"}'


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with running_model_hub() as hub:
        yield hub


@pytest.fixture
def harness(make_harness: Callable[..., Any]) -> Any:
    return make_harness(replicas=2)


def put(store: Store, key: str, data: bytes) -> StoredObject:
    store.put(key, data)
    return StoredObject(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def checkpoint(harness: Any, *, final: bool = False) -> Checkpoint:
    store = store_for(harness.run)
    who = "00001-0123abcd"
    folder = keys.final_dir(0, who) if final else keys.checkpoint_dir(7, 0, who)
    weights = put(store, f"{folder}{'model' if final else 'weights'}.safetensors", WEIGHTS)
    if final:
        manifest = FinalManifest(
            round=7,
            reason="completed",
            writer=identity(0),
            weights_digest="d",
            weights=weights,
            config=put(store, f"{folder}config.json", CONFIG),
            summary=put(store, f"{folder}summary.json", b"{}"),
            wall_s=1.0,
        )
        store.create(keys.FINAL_MANIFEST, manifest.to_bytes())
    result: Checkpoint = Checkpoint.objects.create(
        run=harness.run,
        round=7,
        final=final,
        key=weights.key,
        size_bytes=weights.size_bytes,
        digest=weights.sha256,
        created_at=harness.clock(),
    )
    return result


def credential(
    harness: Any, url: str, *, token: str = TOKEN, kind: str = "huggingface"
) -> Credential:
    values = {"HF_TOKEN": token, "HF_ENDPOINT": url}
    made: Credential = Credential.objects.create(
        name="hub",
        kind=kind,
        sealed=vault.seal(values),
        fields=sorted(values),
        options={"scheme": "hf"},
        created_at=harness.clock(),
        changed_at=harness.clock(),
    )
    return made


def upload(made: Checkpoint, result: Credential) -> str:
    hub_upload.export(made.pk, result.pk, REPO, True, made.run.owner.pk)
    event = Event.objects.filter(run=made.run, kind=hub_upload.KIND).first()
    assert event is not None
    return f"{event.level}: {event.message}"


def test_final_weights_with_config_and_card(harness: Any, hub: ModelHub) -> None:
    reported = upload(checkpoint(harness, final=True), credential(harness, hub.url))
    assert reported == f"info: final @ 7 is at {hub.url}/{REPO}"
    assert hub.files["model.safetensors"] == WEIGHTS
    assert hub.files["config.json"] == CONFIG
    card = hub.files["README.md"].decode()
    assert hashlib.sha256(WEIGHTS).hexdigest() in card
    assert "final, after round 7" in card
    assert json.loads(card.split("```json")[1].split("```")[0]) == harness.run.workload
    assert hub.created[-1]["visibility"] == "private"


def test_the_card_has_the_metrics_of_its_round(harness: Any, hub: ModelHub) -> None:
    Run.objects.filter(pk=harness.run.pk).update(eval_loss=2.25, eval_round=7)
    harness.run.refresh_from_db()
    plan = EvaluationPlan.objects.create(
        run=harness.run, name="val", spec={}, backend="local", created_at=harness.clock()
    )
    for round, perplexity in ((6, 99.0), (7, 9.5)):
        Evaluation.objects.create(
            plan=plan,
            run=harness.run,
            round=round,
            state=Evaluation.State.SUCCEEDED,
            metrics={"perplexity": [perplexity, None], "arc_easy_acc": [0.5, 0.01]},
            created_at=harness.clock(),
            next_at=harness.clock(),
        )
    upload(checkpoint(harness, final=True), credential(harness, hub.url))
    text = hub.files["README.md"].decode()
    assert "| val | arc_easy_acc | 0.5 | 0.01 |" in text
    data = ModelCard(text).data
    assert data.tags == ["diloco"]
    assert data.model_name == REPO
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in data.eval_results] == [
        ("held-out data of the run", "loss", 2.25),
        ("val", "perplexity", 9.5),
        ("val", "arc_easy_acc", 0.5),
    ]


def test_a_checkpoint_without_config_is_described_in_the_card(harness: Any, hub: ModelHub) -> None:
    hub.files.clear()
    assert upload(checkpoint(harness), credential(harness, hub.url)).startswith(
        "info: checkpoint @ 7"
    )
    assert set(hub.files) == {"model.safetensors", "README.md"}
    card = hub.files["README.md"].decode()
    assert "has no `config.json`" in card
    assert "`from_pretrained` does not load it" in card


def test_an_error_is_an_event_without_the_token(harness: Any, hub: ModelHub) -> None:
    made, result = checkpoint(harness), credential(harness, hub.url)
    hub_upload.export(made.pk, result.pk, "islands/gated", False, made.run.owner.pk)
    event = Event.objects.filter(run=made.run, kind=hub_upload.KIND).first()
    assert event is not None and event.level == "error"
    assert "403" in event.message and "restricted" in event.message
    assert TOKEN not in event.message


def test_damaged_or_swept_weights_are_not_uploaded(harness: Any, hub: ModelHub) -> None:
    made, result = checkpoint(harness), credential(harness, hub.url)
    store = store_for(harness.run)
    hub.files.clear()
    store.put(made.key, WEIGHTS[:-1] + b"!")
    assert "expected the digest" in upload(made, result)
    store.put(made.key, WEIGHTS[:-1])
    assert f"expected {len(WEIGHTS)} bytes, found {len(WEIGHTS) - 1}" in upload(made, result)
    store.delete([made.key])
    assert upload(made, result).startswith("error: ")
    assert not hub.files


def test_a_request_is_an_event_and_a_task(
    harness: Any, hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(hub_upload, "enqueue", lambda *args: sent.append(args))
    made, result = checkpoint(harness), credential(harness, hub.url, kind="store")
    actor: User = made.run.owner
    hub_upload.ask(
        made, credential_id=str(result.pk), repository=f" {REPO} ", private=True, actor=actor
    )
    assert sent == [("export_checkpoint", made.pk, result.pk, REPO, True, actor.pk)]
    assert Event.objects.filter(kind=hub_upload.KIND).get().actor == actor


@pytest.mark.parametrize(
    "repository", ["", "alone", "a/b/c", "../etc", "a/b c", "a/" + "b" * 200, "-a/b", "a/b--c"]
)
def test_an_invalid_repository_name_is_refused(
    harness: Any, hub: ModelHub, repository: str
) -> None:
    made, result = checkpoint(harness), credential(harness, hub.url)
    with pytest.raises(ActionRefused, match="expected a repository"):
        hub_upload.ask(
            made,
            credential_id=str(result.pk),
            repository=repository,
            private=True,
            actor=made.run.owner,
        )


@pytest.mark.parametrize("named", ["", "x", "999999", "²"])
def test_another_credential_does_not_open_the_hub(harness: Any, named: str) -> None:
    Credential.objects.create(
        name="bucket",
        kind="store",
        sealed=vault.seal({"AWS_REGION": "x"}),
        fields=["AWS_REGION"],
        created_at=harness.clock(),
        changed_at=harness.clock(),
    )
    known = Credential.objects.get().pk
    for credential_id in (named, str(known)):
        with pytest.raises(ActionRefused, match="expected a credential"):
            hub_upload.ask(
                checkpoint(harness) if credential_id == named else Checkpoint.objects.get(),
                credential_id=credential_id,
                repository=REPO,
                private=True,
                actor=harness.run.owner,
            )
