"""Uploads a checkpoint of a run as a model to the Hugging Face Hub.

For a Transformers model (the ``huggingface`` workload) the upload is what ``from_pretrained``
loads: weights, config and tokenizer (:mod:`runs.export.hub_files`); the card lists missing files.
For other workloads it is the bucket's content: the weights (``model.safetensors``) and, for final
weights, ``config.json``. A model card states their origin and has the
metrics of their evaluations (:mod:`runs.export.model_card`). Torch is not needed.

Weights go through a temporary file, because the Hub needs their digest first; the disk must have
room for them. API: https://huggingface.co/docs/huggingface_hub/guides/upload
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import User

from diloco.model_card import table_text
from diloco.protocol import keys
from diloco.protocol.records import BadRecord, FinalManifest, StoredObject
from diloco.store.base import MissingKey, Store, StoreError
from executors.base import ExecutorError
from runs.credentials import DecryptionError
from runs.credentials.vault import open_credential
from runs.exceptions import ActionRefused
from runs.export import hub_files
from runs.export.hub_files import Extra, Source
from runs.export.model_card import card
from runs.ingest.objects import DigestMismatch, fetch
from runs.ingest.stores import store_for
from runs.models import Checkpoint, Credential, Event
from runs.redaction import clean_text
from runs.task_queue import enqueue
from runs.transitions import record_event

if TYPE_CHECKING:
    from executors.huggingface.client import Hub

TOKEN = "HF_TOKEN"  # noqa: S105 -- the name of a variable
KIND = "hub_export"
"""Kind of the events: requested, done, failed."""
PATIENCE_S = 60.0
_CONFIG_LIMIT = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,94}/[A-Za-z0-9][\w.-]{0,94}")


def credentials() -> list[Credential]:
    """Credentials with a Hub token, for Jobs or for a repository as a store."""
    stored = Credential.objects.filter(kind__in=("huggingface", "store")).order_by("name")
    return [credential for credential in stored if TOKEN in credential.fields]


def ask(
    checkpoint: Checkpoint, *, credential_id: str, repository: str, private: bool, actor: User
) -> None:
    """Validate the request and enqueue the upload. Raises :class:`ActionRefused`."""
    repository = repository.strip()
    if not _NAME.fullmatch(repository) or ".." in repository or "--" in repository:
        raise ActionRefused(
            f"expected a repository such as acme/small-model, found {repository[:80]!r}"
        )
    credential = next((c for c in credentials() if str(c.pk) == credential_id), None)
    if credential is None:
        raise ActionRefused("expected a credential with a Hub token, found none")
    record_event(
        checkpoint.run,
        KIND,
        f"{checkpoint} is uploaded to {repository} with {credential}",
        actor=actor,
    )
    enqueue("export_checkpoint", checkpoint.pk, credential.pk, repository, private, actor.pk)


def export(
    checkpoint_id: int, credential_id: int, repository: str, private: bool, actor_id: int
) -> None:
    """Upload and record the result as an event. Idempotent."""
    checkpoint = Checkpoint.objects.select_related("run").filter(pk=checkpoint_id).first()
    credential = next((c for c in credentials() if c.pk == credential_id), None)
    if checkpoint is None or credential is None:
        return
    run = checkpoint.run
    actor = User.objects.filter(pk=actor_id).first()
    try:
        address = _upload(checkpoint, credential, repository, private=private)
    except (
        MissingKey,
        StoreError,
        BadRecord,
        DigestMismatch,
        ExecutorError,
        DecryptionError,
        OSError,
    ) as error:
        message = f"{checkpoint} could not be uploaded to {repository}: {error}"
        level = Event.Level.ERROR
    else:
        message, level = f"{checkpoint} is at {address}", Event.Level.INFO
    record_event(run, KIND, clean_text(message), level=level, actor=actor)


def _upload(
    checkpoint: Checkpoint, credential: Credential, repository: str, *, private: bool
) -> str:
    """Upload; return the address, with a note about missing files."""
    from huggingface_hub import CommitOperationAdd  # lazily: web processes do not need it

    from executors.huggingface.client import Hub

    store = store_for(checkpoint.run)
    secrets = open_credential(credential)
    hub = Hub(
        token=secrets[TOKEN], endpoint=secrets.get("HF_ENDPOINT") or None, patience_s=PATIENCE_S
    )
    # The run of a checkpoint can have final weights, whose config describes the same model.
    manifest = _final_manifest(store)
    workload = hub_files.workload_of(checkpoint)
    if workload is None and not checkpoint.final:
        manifest = None
    with tempfile.TemporaryDirectory(prefix="archipelago-hub-") as folder:
        path = Path(folder) / "model.safetensors"
        hub_files.fetch_weights(store, checkpoint, path, as_model=workload is not None)
        files: dict[str, Any] = {"model.safetensors": path}
        config = None if manifest is None else _config(store, manifest)
        extra = Extra(files={} if config is None else {"config.json": config})
        if workload is not None:
            source = _source(hub, Path(folder) / "from", list(secrets.values()))
            extra = hub_files.extra_files(workload, config, source, tuple(secrets.values()))
        files |= extra.files
        model = None if workload is None else extra
        files["README.md"] = card(
            checkpoint, repository, config="config.json" in files, model=model
        ).encode()
        with hub.calling(list(secrets.values())) as api:
            api.create_repo(repository, private=private or None, exist_ok=True)
            commit = api.create_commit(
                repository,
                [CommitOperationAdd(name, content) for name, content in files.items()],
                commit_message=f"Weights of {table_text(checkpoint.run.name)}: {checkpoint}",
            )
    address = str(commit.repo_url)
    missing = f"; without {', '.join(extra.missing)}" if extra.missing else ""
    return address + missing


def _source(hub: Hub, folder: Path, hidden: list[str]) -> Source:
    """The Hub as the source of base models and tokenizers, with the same token."""

    def names(repository: str, revision: str) -> list[str]:
        with hub.calling(hidden) as api:
            return list(api.list_repo_files(repository, revision=revision or None))

    def get(repository: str, revision: str, file: str) -> Path:
        with hub.calling(hidden) as api:
            return Path(
                api.hf_hub_download(
                    repository,
                    file,
                    revision=revision or None,
                    local_dir=folder / repository.replace("/", "--"),
                )
            )

    return Source(names=names, get=get)


def _final_manifest(store: Store) -> FinalManifest | None:
    """The final manifest; None if there is none. Ingest has compared it with the commits."""
    try:
        return FinalManifest.read(store, keys.FINAL_MANIFEST)
    except MissingKey:
        return None


def _config(store: Store, manifest: FinalManifest) -> bytes:
    described: StoredObject = manifest.config
    if described.size_bytes > _CONFIG_LIMIT:
        raise DigestMismatch(
            f"{described.key}: expected at most {_CONFIG_LIMIT} bytes, found {described.size_bytes}"
        )
    with tempfile.TemporaryFile() as file:
        fetch(store, described, file)
        file.seek(0)
        return file.read()
