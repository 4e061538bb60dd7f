"""State trees in the store, for members that heal and for resuming after all members have died.

The tensors are written first, then a manifest with their digest. A healing state has one writer. A
saved state belongs to the first process that creates its manifest.

A saved state belongs to a branch (:mod:`diloco.protocol.manager_branches`). Only states on the
group's line count as complete, are used to resume, and are among the :data:`KEPT` states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diloco.model.state_tree import join_tree, split_tree
from diloco.model.tensor_file import TensorWriter
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import Line
from diloco.protocol.manager_keys import Saved
from diloco.protocol.manager_records import StateManifest
from diloco.protocol.records import Identity
from diloco.store.base import Store
from diloco.torchft.polling import Waiting
from diloco.training.stored_objects import load_tensors, put_parts

KEPT = 2
"""Number of complete saved states of the group's line that are kept."""


def _manifest(
    store: Store, tensors_key: str, state: Any, *, step: int, writer: Identity
) -> StateManifest:
    tree, tensors = split_tree(state)
    contents = TensorWriter(tensors)
    contents.copy()  # the caller's next step changes the tensors
    stored = put_parts(store, tensors_key, contents.parts)
    return StateManifest(step=step, writer=writer, tree=tree, tensors=stored)


def send(store: Store, n: int, rank: int, state: Any, *, step: int, writer: Identity) -> None:
    """Write the healing state of round ``n`` for members of this rank."""
    key = manager_keys.heal_state(n, rank)
    manifest = _manifest(store, f"{key}.safetensors", state, step=step, writer=writer)
    store.put(f"{key}.json", manifest.to_bytes())


def receive(store: Store, n: int, rank: int, wait: Waiting, *, why_lost: Callable[[], str]) -> Any:
    """Wait for the healing state of round ``n``.

    ``why_lost`` returns why its writer will not send it, or ''. Raises
    :class:`~diloco.torchft.polling.MemberLost` or :class:`TimeoutError`.
    """
    key = f"{manager_keys.heal_state(n, rank)}.json"
    return wait.read(
        lambda: _tree(store, StateManifest.read(store, key)),
        "a state to heal from",
        writer="the member to heal from",
        why_lost=why_lost,
    )


def _tree(store: Store, manifest: StateManifest) -> Any:
    return join_tree(manifest.tree, load_tensors(store, manifest.tensors))


def save(
    store: Store, rank: int, state: Any, *, saved: Saved, writer: Identity, wall_s: float
) -> None:
    """Save the state of one rank, unless another process has saved it."""
    tensors_key = manager_keys.saved_tensors(saved, rank, writer.replica, writer.incarnation)
    manifest = _manifest(store, tensors_key, state, step=saved.step, writer=writer)
    manifest = replace(manifest, wall_s=wall_s)
    if not store.create(f"{manager_keys.saved_state(saved, rank)}.json", manifest.to_bytes()):
        store.delete([tensors_key])


def sweep(store: Store, line: Line, *, ranks: Sequence[int]) -> None:
    """Delete the saved states before the newest :data:`KEPT` complete ones of ``line``, and those
    of abandoned branches once the line has as many. States newer than the line are kept: this
    process can be the one that is behind."""
    complete = complete_states(store, line, ranks=ranks)
    if len(complete) < KEPT:
        return
    oldest_kept = complete[-KEPT]
    newest = (line.branch, line.head)
    objects = [
        (parsed, info.key)
        for info in store.list(manager_keys.STATES)
        if (parsed := manager_keys.parse_saved(info.key))
    ]
    obsolete = [
        (is_manifest, key)
        for (saved, _, is_manifest), key in objects
        if (saved.branch, saved.head) <= newest
        and (saved < oldest_kept or not line.contains(saved.branch, saved.head))
    ]
    # Manifests first, so that no manifest names a deleted object.
    store.delete([key for is_manifest, key in sorted(obsolete, key=lambda pair: not pair[0])])


def complete_states(store: Store, line: Line, *, ranks: Sequence[int]) -> list[Saved]:
    """Return the states of ``line`` that all ``ranks`` have saved, oldest first."""
    ranks_of: dict[Saved, set[int]] = {}
    for info in store.list(manager_keys.STATES):
        parsed = manager_keys.parse_saved(info.key)
        if parsed and parsed[2] and line.contains(parsed[0].branch, parsed[0].head):
            ranks_of.setdefault(parsed[0], set()).add(parsed[1])
    return sorted(saved for saved, stored in ranks_of.items() if stored >= set(ranks))


def load(store: Store, rank: int, saved: Saved) -> tuple[Any, float]:
    """Load a state; return it with the wall time at which it was saved (0 if unknown)."""
    manifest = StateManifest.read(store, f"{manager_keys.saved_state(saved, rank)}.json")
    return _tree(store, manifest), manifest.wall_s
