"""State trees in the store: for a member that heals, and to resume from after everyone has died.

The tensors are written first, then a manifest that names them by digest. A healing state has one
writer; of a saved one, whoever first creates its manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safetensors.torch import save as save_safetensors

from diloco.checkpoint import load_tensors, put_object
from diloco.managed.waiting import MemberLost, Waiting
from diloco.rendezvous import manager_keys
from diloco.rendezvous.manager_records import StateManifest
from diloco.rendezvous.records import Identity
from diloco.rendezvous.store import MissingKey, Store
from diloco.tree import join_tree, split_tree

KEPT = 2
"""Saved states of each rank."""


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
    :class:`~diloco.managed.waiting.MemberLost`, :class:`TimeoutError`."""
    key = f"{manager_keys.heal_state(n, rank)}.json"
    while True:
        try:
            return _read(store, key)
        except MissingKey:
            if why := why_lost():
                raise MemberLost(f"the member to heal from {why}") from None
            if not wait.pause():
                raise TimeoutError(
                    f"expected a state to heal from within {wait.waited_s:.1f} s, found none"
                ) from None


def _read(store: Store, key: str) -> Any:
    manifest = StateManifest.read(store, key)
    return join_tree(manifest.tree, load_tensors(store, manifest.tensors))


def save(store: Store, rank: int, state: Any, *, step: int, writer: Identity) -> None:
    """Save the state of one rank after ``step``, and delete what it supersedes."""
    tensors_key = manager_keys.saved_tensors(step, rank, writer.replica, writer.incarnation)
    manifest = _manifest(store, tensors_key, state, step=step, writer=writer)
    if not store.create(f"{manager_keys.saved_state(step, rank)}.json", manifest.to_bytes()):
        store.delete([tensors_key])
        return
    steps = saved_steps(store, ranks=[rank])
    doomed = {manager_keys.saved_state(old, rank) for old in steps[:-KEPT]}
    listed = [info.key for info in store.list(manager_keys.STATES)] if doomed else []
    keys = [key for key in listed if key.partition(".")[0] in doomed]
    # Manifests first: what has no manifest is not looked for.
    store.delete(sorted(keys, key=lambda key: not key.endswith(".json")))


def saved_steps(store: Store, *, ranks: list[int]) -> list[int]:
    """Steps of which the states of all ``ranks`` are there, ascending."""
    found: dict[int, set[int]] = {}
    for info in store.list(manager_keys.STATES):
        if parsed := manager_keys.parse_saved_state(info.key):
            found.setdefault(parsed[0], set()).add(parsed[1])
    return sorted(step for step, there in found.items() if there >= set(ranks))


def load(store: Store, rank: int, step: int) -> Any:
    return _read(store, f"{manager_keys.saved_state(step, rank)}.json")
