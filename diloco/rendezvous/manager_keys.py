"""Object paths of the torchft-shaped Manager (:mod:`diloco.manager`), beside those of ``keys``.

::

    manager/names/<number>.json                create-once: which member a number is
    members/<number>/<incarnation>/beat.json   leases, as of any replica (``keys``)
    manager/quorums/<n>.json                   create-once: who starts round n
    manager/commits/<n>.<c>.json               create-once: who is in, the c-th time it is asked
    manager/rounds/<n>/joins/...               who wants to be in quorum n
    manager/rounds/<n>/payloads/...            what each member's allreduce calls brought
    manager/rounds/<n>/votes/<c>/...           whether a member came through
    manager/rounds/<n>/state/<rank>...         what a healing member takes
    manager/states/<step>/<rank>...            what a group resumes from after everyone has died

A *member* is one rank of one replica group. Rounds are numbered on their own, because a step whose
commit failed is done again in another round. Rounds are deleted when the one after the next has
begun; names, quorums and commits are kept, so that nothing that was decided can be decided again.
"""

from __future__ import annotations

import re

NAMES = "manager/names/"
STATES = "manager/states/"


def name(number: int) -> str:
    return f"{NAMES}{number:05d}.json"


def quorum(n: int) -> str:
    return f"manager/quorums/{n:08d}.json"


def commit(n: int, c: int) -> str:
    return f"manager/commits/{n:08d}.{c:04d}.json"


def round_dir(n: int) -> str:
    return f"manager/rounds/{n:08d}/"


def joins(n: int) -> str:
    return f"{round_dir(n)}joins/"


def join(n: int, member: int, incarnation: str) -> str:
    return f"{joins(n)}{member:05d}.{incarnation}.json"


def payload(n: int, member: int, incarnation: str, batch: int) -> str:
    return f"{round_dir(n)}payloads/{member:05d}.{incarnation}.{batch:04d}.bin"


def votes(n: int, c: int) -> str:
    return f"{round_dir(n)}votes/{c:04d}/"


def vote(n: int, c: int, member: int, incarnation: str) -> str:
    return f"{votes(n, c)}{member:05d}.{incarnation}.json"


def heal_state(n: int, rank: int) -> str:
    """Without its ending: ``.json`` is the manifest, ``.safetensors`` the tensors."""
    return f"{round_dir(n)}state/{rank:05d}"


def saved_state(step: int, rank: int) -> str:
    return f"{STATES}{step:08d}/{rank:05d}"


def saved_tensors(step: int, rank: int, member: int, incarnation: str) -> str:
    return f"{STATES}{step:08d}/{rank:05d}.{member:05d}.{incarnation}.safetensors"


def parse_saved_state(key: str) -> tuple[int, int] | None:
    """(step, rank) of a saved state's manifest, None for any other key."""
    match = re.fullmatch(r"manager/states/(\d{8})/(\d{5})\.json", key)
    return (int(match[1]), int(match[2])) if match else None
