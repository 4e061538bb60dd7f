"""The Checkpoints tab: checkpoints in the bucket, and permission to download them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from diloco.protocol import keys
from diloco.protocol.object_digest import ObjectDigest
from diloco.protocol.pieces import piece_key
from diloco.protocol.records import CheckpointManifest, Identity, StoredObject
from diloco.store.open import open_store
from runs.ingest.objects import PIECE_BYTES, DigestMismatch
from runs.models import Checkpoint, Credential, Event, Run
from tests.browser import seed, seed_usage

pytestmark = pytest.mark.django_db

WEIGHTS = b"0123456789" * 2_000_000  # three chunks


@pytest.fixture
def run(client: Client, tmp_path: Path) -> Run:
    operator_user = seed.user("olga", "operator")
    client.force_login(operator_user)
    run: Run = seed.run(operator_user, committed=10, replicas=2, state="cancelled")
    run.rendezvous = tmp_path.as_uri()
    run.save()
    return run


def tab(client: Client, run: Run) -> str:
    return client.get(reverse("run-checkpoints", args=[run.pk])).content.decode()


def stored(run: Run, data: bytes = WEIGHTS) -> Checkpoint:
    seed_usage.checkpoints(run, 8)
    created: Checkpoint = Checkpoint.objects.get(run=run)
    open_store(run.rendezvous).put(created.key, data)
    Checkpoint.objects.update(size_bytes=len(WEIGHTS), digest=hashlib.sha256(WEIGHTS).hexdigest())
    created.refresh_from_db()
    return created


def download(client: Client, created: Checkpoint) -> Any:
    return client.get(reverse("checkpoint-download", args=[created.run_id, created.pk]))


def test_checkpoints_have_their_actions(client: Client, run: Run) -> None:
    assert "No checkpoints yet" in tab(client, run)
    seed_usage.checkpoints(run, 0, 5, 10)
    text = tab(client, run)
    assert "Resume from the newest" in text
    assert [f"fork={run.pk}&amp;round={n}" in text for n in (0, 5, 10)] == [False, True, True]
    assert text.count("deleted from the bucket") == 1
    assert seed.digest("checkpoint 10") in text
    assert "No credential has a Hugging Face Hub token" in text
    page = client.get(reverse("run", args=[run.pk]) + "?tab=checkpoints").content.decode()
    assert seed.digest("checkpoint 10") in page


def test_a_run_with_final_weights_is_not_resumed(client: Client, run: Run) -> None:
    seed_usage.checkpoints(run, 10, final=True)
    text = tab(client, run)
    assert "Final, round 10" in text
    assert "Resume from the newest" not in text


def test_viewers_see_checkpoints_but_cannot_download(client: Client, run: Run) -> None:
    created = stored(run)
    client.force_login(seed.user("vera", "viewer"))
    text = tab(client, run)
    assert "Round 8" in text
    for word in ("Download", "To the Hub", "Fork", "Resume"):
        assert word not in text
    assert download(client, created).status_code == 403
    assert client.post(reverse("checkpoint-export", args=[run.pk, created.pk])).status_code == 403


def test_weights_are_streamed_completely(client: Client, run: Run) -> None:
    response = download(client, stored(run))
    parts = list(response.streaming_content)
    assert b"".join(parts) == WEIGHTS
    assert [len(p) for p in parts] == [PIECE_BYTES, PIECE_BYTES, len(WEIGHTS) - 2 * PIECE_BYTES]
    assert response["Content-Length"] == str(len(WEIGHTS))
    assert (
        response["Content-Disposition"] == 'attachment; filename="local-demo-round-8.safetensors"'
    )


@pytest.mark.parametrize("damaged", [False, True])
def test_weights_of_several_ranks_are_sent_as_one_file(
    client: Client, run: Run, damaged: bool
) -> None:
    created, store = stored(run), open_store(run.rendezvous)
    sizes = (PIECE_BYTES + 5, 7, len(WEIGHTS) - PIECE_BYTES - 12)
    digest, at = ObjectDigest(sha256=False, pieces=sizes), 0
    digest.update(WEIGHTS)
    for n, size in enumerate(sizes):
        store.put(piece_key(created.key, n), WEIGHTS[at : at + size])
        at += size
    weights = StoredObject(
        key=created.key, size_bytes=len(WEIGHTS), checksums=digest.checksums, pieces=sizes
    )
    manifest = CheckpointManifest(
        round=8,
        writer=Identity(replica=0, incarnation="00001-0123abcd"),
        model_hash="",
        base_rounds=(8,),
        tensors=(),
        weights_digest="",
        weights=weights,
        outer=None,
        tokens_total=0,
        wall_s=0.0,
    )
    store.put(keys.checkpoint_manifest(8), manifest.to_bytes())
    Checkpoint.objects.update(digest=weights.digest)
    if damaged:
        store.put(piece_key(created.key, 1), b"1234567")
    response = download(client, created)
    if damaged:
        assert response.status_code == 502 and b"expected the digest" in response.content
    else:
        assert b"".join(response.streaming_content) == WEIGHTS


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "link", "fifo"])
def test_damaged_weights_are_not_sent(
    client: Client, run: Run, tmp_path: Path, damage: str
) -> None:
    created = stored(run)
    path = tmp_path / created.key
    if damage == "link":
        (tmp_path / "key").write_bytes(WEIGHTS)
        path.unlink()
        path.symlink_to(tmp_path / "key")
    elif damage == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        data = {"flipped": WEIGHTS[:-1] + b"x", "shorter": WEIGHTS[:-1], "longer": WEIGHTS + b"x"}
        path.write_bytes(data[damage])
    response = download(client, created)
    if damage == "longer":  # only the bytes of the manifest are sent
        assert b"".join(response.streaming_content) == WEIGHTS
        return
    assert (response.status_code, response["Content-Type"]) == (502, "text/plain; charset=utf-8")
    assert b"Download failed" in response.content


@pytest.mark.parametrize("flipped", [0, PIECE_BYTES + 5, len(WEIGHTS) - 1])
def test_the_last_chunk_of_damaged_weights_is_not_sent(
    client: Client, run: Run, flipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runs.ingest.objects.READ_TWICE_BYTES", 0)
    created = stored(run)
    data = WEIGHTS[:flipped] + b"x" + WEIGHTS[flipped + 1 :]
    open_store(run.rendezvous).put(created.key, data)
    response = download(client, created)
    sent = b""
    with pytest.raises(DigestMismatch, match="expected the digest"):
        for piece in response.streaming_content:
            sent += piece
    assert len(sent) == 2 * PIECE_BYTES < int(response["Content-Length"])


@pytest.mark.parametrize(
    "key",
    [
        "../../credentials.key",
        "/etc/passwd",
        "group.json",
        "",
        "a//b",
        "checkpoints/x",
        "a\x00b",
        "checkpoints/00000007/00000.00001-0123abcd/weights.safetensors",
        "checkpoints/00000008/00000.00001-0123abcd/../../../group.json",
        "checkpoints/00000008/00000.00001-0123abcd/outer.safetensors",
    ],
)
def test_a_key_of_another_object_is_rejected(
    client: Client, run: Run, tmp_path: Path, key: str
) -> None:
    created = stored(run)
    (tmp_path / "group.json").write_bytes(WEIGHTS)
    Checkpoint.objects.update(key=key)
    response = download(client, created)
    assert response.status_code == 502
    assert b"expected a manifest that names the weights of checkpoint @ 8" in response.content


@pytest.mark.parametrize("digest", ["", "x", "A" * 64])
def test_weights_without_a_digest_are_not_sent(client: Client, run: Run, digest: str) -> None:
    created = stored(run)
    Checkpoint.objects.update(digest=digest)
    assert b"expected a manifest with a digest" in download(client, created).content


def test_deleted_weights_are_a_404(client: Client, run: Run) -> None:
    created = stored(run)
    open_store(run.rendezvous).delete([created.key])
    assert download(client, created).status_code == 404


def test_a_checkpoint_of_another_run_is_a_404(client: Client, run: Run) -> None:
    other = stored(run)
    own = seed.run(run.owner, name="Mine", committed=2)
    address = reverse("checkpoint-download", args=[own.pk, other.pk])
    assert client.get(address).status_code == 404


def test_the_export_form_lists_credentials_without_secrets(client: Client, run: Run) -> None:
    created = stored(run)
    for name, kind, fields in (
        ("hub of acme", "huggingface", ["HF_TOKEN"]),
        ("our bucket", "store", ["AWS_REGION"]),
    ):
        Credential.objects.create(
            name=name,
            kind=kind,
            sealed="x",
            fields=fields,
            created_at=run.created_at,
            changed_at=run.created_at,
        )
    text = tab(client, run)
    assert "hub of acme" in text and "our bucket" not in text
    address = reverse("checkpoint-export", args=[run.pk, created.pk])
    bad = client.post(address, {"repository": "alone", "credential": "1"}, follow=True)
    assert "expected a repository such as acme/small-model" in bad.content.decode()
    known = Credential.objects.get(kind="huggingface")
    good = {"repository": "acme/model", "credential": str(known.pk), "private": "1"}
    assert client.post(address, good)["Location"].endswith("?tab=checkpoints")
    event = Event.objects.get(run=run, kind="hub_export")
    assert event.message == "checkpoint @ 8 is uploaded to acme/model with hub of acme"
    assert "Uploads to the Hub" in tab(client, run)


def test_the_number_of_queries_does_not_depend_on_checkpoints(client: Client, run: Run) -> None:
    counts = []
    for rounds in ([1], range(2, 60)):
        seed_usage.checkpoints(run, *rounds)
        with CaptureQueriesContext(connection) as result:
            tab(client, run)
        counts.append(len(result))
    assert counts[0] == counts[1]
