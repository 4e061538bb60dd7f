"""Create a group without the dashboard: ``python -m diloco.init URI`` or :func:`create_group`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.clock import Clock, SystemClock
from diloco.command_line import add_common_options
from diloco.error_lines import print_error
from diloco.errors import ReplicaError
from diloco.membership.observer import Observer
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument
from diloco.protocol.settings import GroupSettings, SettingsError, setting_fields
from diloco.protocol.workload import BY_REPLICA, COVERAGES, TEXT_FORMATS, WORKLOADS, ByteGPTWorkload
from diloco.store.base import MissingKey, Store, StoreError
from diloco.store.open import open_store
from diloco.store.uris import check_rendezvous


def create_group(
    uri: str,
    settings: GroupSettings,
    *,
    workload: Mapping[str, Any] | None = None,
    name: str = "",
) -> GroupDocument:
    """Create a group: write ``group.json`` under ``uri``.

    ``workload`` can be omitted if replicas bring their own model and data through
    :func:`diloco.join`. Raises :class:`FileExistsError` if ``uri`` already has a group, and
    :class:`~diloco.store.base.StoreError` if the document cannot be written.
    """
    document = GroupDocument.new(settings, name=name, workload=workload)
    if not open_store(uri, coordinator=True).create(keys.GROUP, document.to_bytes()):
        raise FileExistsError(f"expected no group under {uri}, found {keys.GROUP}")
    return document


def _workload(arguments: argparse.Namespace) -> Mapping[str, Any] | None:
    """Return the validated workload, or None if replicas bring their own loop."""
    if arguments.own_loop:
        return None
    if arguments.workload is None:
        return ByteGPTWorkload(
            size=arguments.size,
            data=arguments.data,
            data_format=arguments.data_format,
            data_coverage=arguments.data_coverage,
        ).to_dict()
    values = json.loads(arguments.workload.read_text())
    if not isinstance(values, dict) or values.get("kind") not in WORKLOADS:
        expected = ", ".join(WORKLOADS)
        raise SettingsError(
            "workload", f"expected an object of a kind {expected}, found {values!r}"
        )
    return WORKLOADS[values["kind"]].from_dict(values).to_dict()


def replace_model(store: Store, *, clock: Clock) -> None:
    """Delete checkpoint 0, so that the next replica to join defines the model.

    Raises :class:`~diloco.errors.ReplicaError` if a round has been committed or a replica is alive.
    If a lease has not ended, waits for one heartbeat timeout to see whether its replica is alive.
    """
    document = GroupDocument.read(store)
    try:
        store.get_range(keys.commit(1), 0, 1)
    except MissingKey:
        pass
    else:
        raise ReplicaError(
            f"expected no committed round in {store.uri}, found one: the model can't be replaced. "
            "Start a new group under another URI"
        )
    timeout_s = document.settings.heartbeat_timeout_s
    observer = Observer(store, clock=clock, timeout_s=timeout_s)
    observer.look()
    if live := observer.live():
        observer.ask(live)
        clock.sleep(timeout_s)
        observer.look()
    if live := observer.live():
        raise ReplicaError(
            f"expected no live replica, found {', '.join(map(str, sorted(live)))}: stop it, then "
            "try again"
        )
    objects = [info.key for info in store.list(keys.CHECKPOINTS)]
    store.delete(sorted(objects, key=lambda key: not key.endswith(".json")))


def _replace_model(uri: str) -> int:
    replace_model(open_store(uri, coordinator=True), clock=SystemClock())
    print(f"deleted the model of {uri}; the next replica to join defines it")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco.init", description=__doc__)
    parser.add_argument("uri", help="rendezvous URI, e.g. s3://bucket/run or a folder")
    parser.add_argument("--settings", type=Path, help="JSON file with group settings to change")
    parser.add_argument("--size", default="demo", help="size of the byte-level GPT")
    parser.add_argument("--data", default="stdlib", help="'stdlib' or a URI of text files")
    parser.add_argument(
        "--data-format", default="text", choices=TEXT_FORMATS, help="text, or token shards"
    )
    parser.add_argument(
        "--data-coverage",
        default=BY_REPLICA,
        choices=COVERAGES,
        help="how an epoch of token shards is divided: by replica number, or in work units",
    )
    parser.add_argument("--workload", type=Path, help="JSON file that describes another workload")
    parser.add_argument(
        "--own-loop",
        action="store_true",
        help="replicas bring their own model and data and call diloco.join",
    )
    parser.add_argument("--name", default="")
    for spec in setting_fields():
        kind = {"int": int, "float": float, "choice": str}[spec.kind]
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}", dest=spec.name, type=kind, help=spec.help
        )
    parser.add_argument(
        "--replace-model",
        action="store_true",
        help="in a group that has committed no round and has no live replica: delete the model "
        "that the first replica to join has defined, so that the next one defines it",
    )
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    try:
        check_rendezvous(arguments.uri, relative=True)
        if arguments.replace_model:
            return _replace_model(arguments.uri)
        chosen = json.loads(arguments.settings.read_text()) if arguments.settings else {}
        for spec in setting_fields():
            if getattr(arguments, spec.name) is not None:
                chosen[spec.name] = getattr(arguments, spec.name)
        if arguments.own_loop:
            chosen.setdefault("warmup_steps", 0)  # a setting of built-in workloads only
        workload = _workload(arguments)
        document = create_group(
            arguments.uri,
            GroupSettings.from_dict(GroupSettings().to_dict() | chosen),
            workload=workload,
            name=arguments.name,
        )
    except (ReplicaError, SettingsError, StoreError, OSError, ValueError) as error:
        print_error(error, uri=arguments.uri, verbose=arguments.verbose)
        return 1
    print(f"group {document.run_id} at {arguments.uri}")
    if arguments.own_loop:
        print(f"take part with: diloco.join({arguments.uri!r}, model, optimizer)")
    else:
        print(f"start replicas with: REPLICA_RANK=0 python -m diloco.replica {arguments.uri}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
