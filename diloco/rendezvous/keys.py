"""Every object path there is, relative to the rendezvous URI.

Numbers are zero-padded so that a listing sorts as the numbers do. An *incarnation* is one process
start, ``<seq>-<nonce>``; of two incarnations of a replica the higher string is the newer.
"""

from __future__ import annotations

import re

GROUP = "group.json"
MEMBERS = "members/"
ROUNDS = "rounds/"
CHECKPOINTS = "checkpoints/"
CONTROL = "control/"
JOURNAL = "control/journal/"
FINAL = "final/"
FINAL_MANIFEST = "final/manifest.json"

_INCARNATION = re.compile(r"\d{5}-[0-9a-f]{8}")


def incarnation(seq: int, nonce: str) -> str:
    name = f"{seq:05d}-{nonce}"
    if not _INCARNATION.fullmatch(name):
        raise ValueError(f"expected a sequence number and 8 hex digits, found {seq} and {nonce!r}")
    return name


def is_incarnation(name: str) -> bool:
    return _INCARNATION.fullmatch(name) is not None


def incarnation_seq(name: str) -> int:
    return int(name.split("-", 1)[0])


def code_bundle(sha256: str) -> str:
    return f"code/{sha256}.zip"


def member(replica: int) -> str:
    return f"{MEMBERS}{replica:05d}/"


def beat(replica: int, incarnation: str) -> str:
    return f"{member(replica)}{incarnation}/beat.json"


def parse_beat(key: str) -> tuple[int, str] | None:
    """(replica, incarnation) of a lease key, None for any other key."""
    match = re.fullmatch(r"members/(\d{5})/(\d{5}-[0-9a-f]{8})/beat\.json", key)
    return (int(match[1]), match[2]) if match else None


def round_dir(round: int) -> str:
    return f"{ROUNDS}{round:08d}/"


def contributions(round: int) -> str:
    return f"{round_dir(round)}contributions/"


def contribution_payload(round: int, replica: int, incarnation: str) -> str:
    return f"{contributions(round)}{replica:05d}.{incarnation}.bin"


def contribution_record(round: int, replica: int, incarnation: str) -> str:
    return f"{contributions(round)}{replica:05d}.{incarnation}.json"


def parse_contribution_record(key: str) -> tuple[int, int, str] | None:
    """(round, replica, incarnation) of a contribution record's key, None for any other key."""
    match = re.fullmatch(r"rounds/(\d{8})/contributions/(\d{5})\.(\d{5}-[0-9a-f]{8})\.json", key)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def plan(round: int) -> str:
    return f"{round_dir(round)}plan.json"


def commit(round: int) -> str:
    return f"{round_dir(round)}commit.json"


def reduced(round: int) -> str:
    return f"{round_dir(round)}reduced/"


def reduced_shard(round: int, shard: int, digest: str) -> str:
    return f"{reduced(round)}{shard:05d}.{digest}"


def parse_reduced_shard(key: str) -> tuple[int, int, str] | None:
    """(round, shard, digest) of a reduced object's key, None for any other key."""
    match = re.fullmatch(r"rounds/(\d{8})/reduced/(\d{5})\.([0-9a-f]{64})", key)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def is_exchanged(key: str) -> bool:
    """Whether a key of a round is that of a payload or of a reduced shard."""
    return re.fullmatch(r"rounds/\d{8}/(contributions/[^/]+\.bin|reduced/[^/]+)", key) is not None


def checkpoint_dir(round: int, replica: int, incarnation: str) -> str:
    return f"{CHECKPOINTS}{round:08d}/{replica:05d}.{incarnation}/"


def checkpoint_manifest(round: int) -> str:
    return f"{CHECKPOINTS}{round:08d}/manifest.json"


def parse_checkpoint_manifest(key: str) -> int | None:
    match = re.fullmatch(r"checkpoints/(\d{8})/manifest\.json", key)
    return int(match[1]) if match else None


def replica_state(replica: int) -> str:
    return f"state/{replica:05d}/"


def replica_state_dir(replica: int, incarnation: str, round: int) -> str:
    return f"{replica_state(replica)}{incarnation}.{round:08d}/"


def replica_state_manifest(replica: int, incarnation: str, round: int) -> str:
    return f"{replica_state_dir(replica, incarnation, round)}manifest.json"


def parse_replica_state(key: str) -> tuple[int, str, int] | None:
    """(replica, incarnation, round) of a state manifest's key, None for any other key."""
    match = re.fullmatch(r"state/(\d{5})/(\d{5}-[0-9a-f]{8})\.(\d{8})/manifest\.json", key)
    return (int(match[1]), match[2], int(match[3])) if match else None


def telemetry(replica: int, incarnation: str, n: int) -> str:
    return f"telemetry/{replica:05d}/{incarnation}/{n:08d}.json"


def control(n: int) -> str:
    return f"{CONTROL}{n:08d}.json"


def journal(n: int) -> str:
    return f"{JOURNAL}{n:08d}.json"


def final_dir(replica: int, incarnation: str) -> str:
    return f"final/{replica:05d}.{incarnation}/"


def final_sample(replica: int, incarnation: str) -> str:
    return f"{final_dir(replica, incarnation)}sample.json"


# -- the plain average (diloco.allreduce), which is of no run -------------------------------------


def allreduce(round_id: str) -> str:
    return f"allreduce/{round_id}/"


def allreduce_session(round_id: str, rank: int) -> str:
    return f"{allreduce(round_id)}sessions/{rank:05d}.json"


def allreduce_payload(round_id: str, group: str, call: int, rank: int) -> str:
    return f"{allreduce(round_id)}{group}/{call:08d}/{rank:05d}.bin"


def parse_allreduce_payload(key: str) -> tuple[str, str, int, int] | None:
    """(round id, group, call, rank) of a payload's key, None for any other key."""
    match = re.fullmatch(r"allreduce/([^/]+)/([0-9a-f]{32})/(\d{8})/(\d{5})\.bin", key)
    return (match[1], match[2], int(match[3]), int(match[4])) if match else None
