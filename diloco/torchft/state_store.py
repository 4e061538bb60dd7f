"""State trees in the store: for a member that heals, and to resume from after everyone has died.

The tensors are written first, then a manifest that names them by digest. A healing state has one
writer; of a saved one, the first process to create its manifest.

A saved state is of a branch (:mod:`diloco.protocol.manager_branches`). Only those on the group's
line are complete, are resumed from, and count for the two that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from safetensors.torch import save as save_safetensors

from diloco.model.state_tree import join_tree, split_tree
from diloco.protocol import manager_keys
from diloco.protocol.manager_branches import Line
from diloco.protocol.manager_keys import Saved
from diloco.protocol.manager_records import StateManifest
from diloco.protocol.records import Identity
from diloco.store.base import MissingKey, Store
from diloco.torchft.polling import MemberLost, Waiting
from diloco.training.checkpoint import load_tensors, put_object

KEPT = 2
"""Complete saved states of the group's line that are kept."""


def _manifest(
    store: Store, tensors_key: str, state: Any, *, step: int, writer: Identity
) -> StateManifest:
    tree, tensors = split_tree(state)
    stored = put_object(store, tensors_key, save_safetensors(tensors))
    return StateManifest(step=step, writer=writer, tree=tree, tensors=stored)


def send(store: Store, n: int, rank: int, state: Any, *, step: int, writer: Identity) -> None:
    """Put a healing state where members of that rank look for it in round ``n``."""
    key = manager_keys.heal_state(n, rank)
    manifest = _manifest(store, f"{key}.safetensors", state, step=step, writer=writer)
    store.put(f"{key}.json", manifest.to_bytes())


def receive(store: Store, n: int, rank: int, wait: Waiting, *, why_lost: Callable[[], str]) -> Any:
    """The healing state of round ``n``. ``why_lost`` says why it will not come, or ''. Raises
    :class:`~diloco.torchft.polling.MemberLost`, :class:`TimeoutError`."""
    key = f"{manager_keys.heal_state(n, rank)}.json"
    while True:
        try:
            return _read(store, key)
        except MissingKey:
            if why := why_lost():
                try:
                    return _read(store, key)  # it may have come just before
                except MissingKey:
                    raise MemberLost(f"the member to heal from {why}") from None
            if not wait.pause():
                raise TimeoutError(
                    f"expected a state to heal from within {wait.waited_s:.1f} s, found none"
                ) from None


def _read(store: Store, key: str) -> Any:
    return _tree(store, StateManifest.read(store, key))


def _tree(store: Store, manifest: StateManifest) -> Any:
    return join_tree(manifest.tree, load_tensors(store, manifest.tensors))


def save(
    store: Store, rank: int, state: Any, *, saved: Saved, writer: Identity, wall_s: float
) -> None:
    """Save the state of one rank, unless that rank of it has been saved."""
    tensors_key = manager_keys.saved_tensors(saved, rank, writer.replica, writer.incarnation)
    manifest = _manifest(store, tensors_key, state, step=saved.step, writer=writer)
    manifest = replace(manifest, wall_s=wall_s)
    if not store.create(f"{manager_keys.saved_state(saved, rank)}.json", manifest.to_bytes()):
        store.delete([tensors_key])


def sweep(store: Store, line: Line, *, ranks: Sequence[int]) -> None:
    """Delete the saved states before the newest :data:`KEPT` complete ones of ``line``; those of
    abandoned branches, once the line has as many. What is newer than the line is not touched: this
    process may be the one that was left behind."""
    complete = complete_states(store, line, ranks=ranks)
    if len(complete) < KEPT:
        return
    oldest_kept = complete[-KEPT]
    newest = (line.branch, line.head)
    found = [(parsed, info.key) for info in store.list(manager_keys.STATES)
             if (parsed := manager_keys.parse_saved(info.key))]  # fmt: skip
    doomed = [
        (is_manifest, key)
        for (saved, _, is_manifest), key in found
        if (saved.branch, saved.head) <= newest
        and (saved < oldest_kept or not line.contains(saved.branch, saved.head))
    ]
    # Manifests first: what has no manifest is not looked for.
    store.delete([key for is_manifest, key in sorted(doomed, key=lambda pair: not pair[0])])


def complete_states(store: Store, line: Line, *, ranks: Sequence[int]) -> list[Saved]:
    """The states of ``line`` that all ``ranks`` have saved, oldest first."""
    there: dict[Saved, set[int]] = {}
    for info in store.list(manager_keys.STATES):
        parsed = manager_keys.parse_saved(info.key)
        if parsed and parsed[2] and line.contains(parsed[0].branch, parsed[0].head):
            there.setdefault(parsed[0], set()).add(parsed[1])
    return sorted(saved for saved, found in there.items() if found >= set(ranks))


def load(store: Store, rank: int, saved: Saved) -> tuple[Any, float]:
    """The state, and when it was saved (wall clock; 0: not known)."""
    manifest = StateManifest.read(store, f"{manager_keys.saved_state(saved, rank)}.json")
    return _tree(store, manifest), manifest.wall_s
