"""A checkpoint of a run as a model on the Hugging Face Hub.

Of a model of Transformers (the ``huggingface`` workload) it is what ``from_pretrained`` loads:
weights, config and tokenizer (:mod:`runs.export.hub_files`), and the card says what of that could
not be had. Of anything else it is what lies in the bucket: the weights (``model.safetensors``) and,
of final weights, their ``config.json``. A model card says where they come from. No torch is needed.

Weights go through a temporary file, because the Hub wants their digest before their bytes; the disk
must have room for them. API: https://huggingface.co/docs/huggingface_hub/guides/upload
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import User

from diloco.protocol import keys
from diloco.protocol.records import BadRecord, FinalManifest, StoredObject
from diloco.store.base import MissingKey, Store, StoreError
from executors.base import ExecutorError
from runs.credentials import CannotOpen
from runs.credentials.vault import open_credential
from runs.exceptions import CannotDo
from runs.export import hub_files
from runs.export.hub_files import Extra, Source
from runs.ingest.objects import NotWhatItWas, fetch
from runs.ingest.stores import store_for
from runs.models import Checkpoint, Credential, Event, Run
from runs.task_queue import enqueue
from runs.transitions import clean_text, record_event

if TYPE_CHECKING:
    from executors.huggingface.client import Hub

TOKEN = "HF_TOKEN"  # noqa: S105 -- the name of a variable
KIND = "hub_export"
"""Of the events: asked, done, failed."""
PATIENCE_S = 60.0
_CONFIG_LIMIT = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,94}/[A-Za-z0-9][\w.-]{0,94}")


def credentials() -> list[Credential]:
    """Those that hold a token of the Hub, be it for Jobs or for a repository as a store."""
    found = Credential.objects.filter(kind__in=("huggingface", "store")).order_by("name")
    return [credential for credential in found if TOKEN in credential.fields]


def ask(
    checkpoint: Checkpoint, *, credential_id: str, repository: str, private: bool, actor: User
) -> None:
    """Check what can be checked here, and leave the rest to a worker. Raises :class:`CannotDo`."""
    repository = repository.strip()
    if not _NAME.fullmatch(repository) or ".." in repository or "--" in repository:
        raise CannotDo(f"expected a repository such as acme/small-model, found {repository[:80]!r}")
    credential = next((c for c in credentials() if str(c.pk) == credential_id), None)
    if credential is None:
        raise CannotDo("expected a credential with a token of the Hub, found none")
    record_event(
        checkpoint.run, KIND, f"{checkpoint} is uploaded to {repository} with {credential}",
        actor=actor,
    )  # fmt: skip
    enqueue("export_checkpoint", checkpoint.pk, credential.pk, repository, private, actor.pk)


def export(
    checkpoint_id: int, credential_id: int, repository: str, private: bool, actor_id: int
) -> None:
    """Upload, and say in an event what came of it. Uploading the same again changes nothing."""
    checkpoint = Checkpoint.objects.select_related("run").filter(pk=checkpoint_id).first()
    credential = next((c for c in credentials() if c.pk == credential_id), None)
    if checkpoint is None or credential is None:
        return
    run = checkpoint.run
    actor = User.objects.filter(pk=actor_id).first()
    try:
        address = _upload(checkpoint, credential, repository, private=private)
    except (
        MissingKey, StoreError, BadRecord, NotWhatItWas, ExecutorError, CannotOpen, OSError
    ) as error:  # fmt: skip
        words = f"{checkpoint} could not be uploaded to {repository}: {error}"
        level = Event.Level.ERROR
    else:
        words, level = f"{checkpoint} is at {address}", Event.Level.INFO
    record_event(run, KIND, clean_text(words), level=level, actor=actor)


def _upload(
    checkpoint: Checkpoint, credential: Credential, repository: str, *, private: bool
) -> str:
    """Where it is then."""
    from huggingface_hub import CommitOperationAdd  # lazily: a web process has no use for it

    from executors.huggingface.client import Hub

    store = store_for(checkpoint.run)
    secrets = open_credential(credential)
    hub = Hub(
        token=secrets[TOKEN], endpoint=secrets.get("HF_ENDPOINT") or None, patience_s=PATIENCE_S
    )
    # A checkpoint's run may have final weights, whose config is of the same model.
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
            done = api.create_commit(
                repository,
                [CommitOperationAdd(name, content) for name, content in files.items()],
                commit_message=f"Weights of {_line(checkpoint.run.name)}: {checkpoint}",
            )
    address = str(done.repo_url)
    missing = f"; without {', '.join(extra.missing)}" if extra.missing else ""
    return address + missing


def _source(hub: Hub, folder: Path, hidden: list[str]) -> Source:
    """The Hub as the place of base models and tokenizers, with the same token."""

    def names(repository: str, revision: str) -> list[str]:
        with hub.calling(hidden) as api:
            return list(api.list_repo_files(repository, revision=revision or None))

    def get(repository: str, revision: str, file: str) -> Path:
        with hub.calling(hidden) as api:
            return Path(
                api.hf_hub_download(
                    repository, file, revision=revision or None,
                    local_dir=folder / repository.replace("/", "--"),
                )
            )  # fmt: skip

    return Source(names=names, get=get)


def _final_manifest(store: Store) -> FinalManifest | None:
    """Of a run that has ended: its commits were compared when it was ingested."""
    try:
        return FinalManifest.read(store, keys.FINAL_MANIFEST)
    except MissingKey:
        return None


def _config(store: Store, manifest: FinalManifest) -> bytes:
    described: StoredObject = manifest.config
    if described.size_bytes > _CONFIG_LIMIT:
        raise NotWhatItWas(
            f"{described.key}: expected at most {_CONFIG_LIMIT} bytes, found {described.size_bytes}"
        )
    with tempfile.TemporaryFile() as file:
        fetch(
            store, described.key, file,
            size_bytes=described.size_bytes, sha256=described.sha256,
        )  # fmt: skip
        file.seek(0)
        return file.read()


def card(
    checkpoint: Checkpoint, repository: str, *, config: bool, model: Extra | None = None
) -> str:
    """The model card: https://huggingface.co/docs/hub/model-cards. ``model``: one of Transformers,
    with what else was uploaded."""
    run: Run = checkpoint.run
    settings = run.group_settings
    loss = run.eval_loss if checkpoint.final else None
    rows = {
        "Run": _line(run.name),
        "Weights": f"{'final, ' if checkpoint.final else ''}after round {checkpoint.round}",
        "Replicas": settings["num_replicas"],
        "Inner steps per round": settings["sync_every"],
        "Codec": settings["codec"],
        "Evaluation loss": f"{loss:.4f} (newest, round {run.eval_round})" if loss else "not given",
        "SHA-256 in the run's bucket": f"`{checkpoint.digest}`",
    }
    if model is not None:
        said = [
            "`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` load this."
            if not model.missing
            else f"Not uploaded: {_line('; '.join(model.missing))}. Add it, or let"
            " `python -m diloco.export` make a whole directory.",
            "The tensors are the bucket's; beside them the file's header says `format: pt`.",
        ]
    else:
        said = [
            "The files are those of the run's bucket, byte for byte"
            + (" (`config.json` as well)." if config else "; a checkpoint has no `config.json`."),
            "It is no model of the `huggingface` workload, so `from_pretrained` does not load it.",
        ]
    told = json.dumps(run.workload, indent=2, sort_keys=True)
    lines = [
        "---", f"library_name: {'safetensors' if model is None else 'transformers'}",
        *([] if model is None else ["pipeline_tag: text-generation"]),
        "tags:", "- diloco", "---",
        f"# {_line(repository)}", "",
        "Trained with DiLoCo: replicas that share a bucket exchange pseudo-gradients.", "",
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items()), "",
        *said, "",
        "The workload:", "", "```json", told.replace("`", "'"), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _line(text: str) -> str:
    """Words of a person inside a table of Markdown."""
    return re.sub(r"[|`<>\[\]\r\n\\]", " ", text).strip() or "a run"
