"""Object keys of the torchft-compatible Manager (:mod:`diloco.manager`), next to those of ``keys``.

::

   manager/names/<number>.json                create-once: the member with this number
   members/<number>/<incarnation>/beat.json   leases, as for any replica (``keys``)
   manager/quorums/<n>.json                   create-once: the members of round n
   manager/commits/<n>.<c>.json               create-once: the c-th commit decision of round n
   manager/rounds/<n>/joins/...               requests to be in quorum n
   manager/rounds/<n>/payloads/...            input of each member's allreduce calls
   manager/rounds/<n>/votes/<c>/...           whether a member completed the round
   manager/rounds/<n>/state/<rank>...         the state that a healing member loads
   manager/states/<branch>.<head>.<step>/...  saved states, for a restart of the whole group
   manager/floor.json                         the oldest round with quorum and commits

A *member* is one rank of one replica group. Rounds have their own numbers, because a step whose
commit failed is repeated in another round. The objects exchanged in a round are deleted when the
next one has ended. Quorums and commits are kept for some hundred rounds, names forever. A process
that creates a quorum, or commits alone, reads the floor afterwards, so that no decision is made
twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMES = "manager/names/"
STATES = "manager/states/"
QUORUMS = "manager/quorums/"
COMMITS = "manager/commits/"
ROUNDS = "manager/rounds/"
FLOOR = "manager/floor.json"


@dataclass(frozen=True, order=True)
class Saved:
    """Identifies a saved state: that of ``branch`` after the commit of round ``head``, at ``step``.
    States of one line are ordered; a step number can occur again on another branch."""

    branch: int
    head: int
    step: int

    @property
    def folder(self) -> str:
        if (self.branch, self.head) == (0, 0):  # the folder of earlier releases
            return f"{STATES}{self.step:08d}/"
        return f"{STATES}{self.branch:08d}.{self.head:08d}.{self.step:08d}/"


def name(number: int) -> str:
    return f"{NAMES}{number:05d}.json"


def quorum(n: int) -> str:
    return f"{QUORUMS}{n:08d}.json"


def commit(n: int, c: int) -> str:
    return f"{COMMITS}{n:08d}.{c:04d}.json"


def round_dir(n: int) -> str:
    return f"{ROUNDS}{n:08d}/"


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
    """Return the key without its suffix: ``.json`` is the manifest, ``.safetensors`` the
    tensors."""
    return f"{round_dir(n)}state/{rank:05d}"


def round_of(key: str) -> int | None:
    """Return the round of a quorum, a commit or an exchanged object; None for any other key."""
    match = re.match(r"manager/(?:quorums|commits|rounds)/(\d{8})[./]", key)
    return int(match[1]) if match else None


def saved_state(saved: Saved, rank: int) -> str:
    """Return the key without its suffix; ``.json`` is the manifest."""
    return f"{saved.folder}{rank:05d}"


def saved_tensors(saved: Saved, rank: int, member: int, incarnation: str) -> str:
    return f"{saved.folder}{rank:05d}.{member:05d}.{incarnation}.safetensors"


def parse_saved(key: str) -> tuple[Saved, int, bool] | None:
    """Return (state, rank, whether it is the manifest) of a saved object's key, None for any other
    key."""
    match = re.fullmatch(
        rf"{STATES}(?:(\d{{8}})\.(\d{{8}})\.)?(\d{{8}})/(\d{{5}})(\.json|\.\d{{5}}\..*)", key
    )
    if match is None:
        return None
    saved = Saved(int(match[1] or 0), int(match[2] or 0), int(match[3]))
    return saved, int(match[4]), match[5] == ".json"
