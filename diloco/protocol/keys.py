"""The object keys of a run, relative to the rendezvous URI.

Numbers are zero-padded, so that a listing sorts numerically. An *incarnation* is one process start,
``<seq>-<nonce>``; of two incarnations of a replica the greater string is the newer.
"""

from __future__ import annotations

import re
from enum import StrEnum

OWNER = "owner.json"
GROUP = "group.json"
MEMBERS = "members/"
ROUNDS = "rounds/"
PACKS = "packs/"
CHECKPOINTS = "checkpoints/"
CONTROL = "control/"
JOURNAL = "control/journal/"
PREFLIGHT = "preflight/"
TELEMETRY = "telemetry/"
FINAL = "final/"
UNITS = "units/"
HELD_UNITS = "units/held/"
EVALUATIONS = "evaluations/"
FINAL_MANIFEST = "final/manifest.json"

EVALUATION_NAME_DIGITS = 16

LAST_REPLICA = 99_999
LAST_ROUND = 99_999_999
"""The largest numbers that a key has room for."""

_INCARNATION = re.compile(r"[0-9]{5}-[0-9a-f]{8}")
_ROUND_RECORD = re.compile(
    rf"rounds/([0-9]{{8}})/(?:contributions/[0-9]{{5}}\.{_INCARNATION.pattern}|plan|commit)\.json"
)


def incarnation(seq: int, nonce: str) -> str:
    """Return the name of an incarnation. Raises :class:`ValueError` for a nonce other than 8 hex
    digits."""
    name = f"{seq:05d}-{nonce}"
    if not _INCARNATION.fullmatch(name):
        raise ValueError(f"expected a sequence number and 8 hex digits, found {seq} and {nonce!r}")
    return name


def is_incarnation(name: str) -> bool:
    """Return whether ``name`` is the name of an incarnation."""
    return _INCARNATION.fullmatch(name) is not None


def incarnation_seq(name: str) -> int:
    return int(name.split("-", 1)[0])


def code_bundle(sha256: str) -> str:
    return f"code/{sha256}.zip"


def member(replica: int) -> str:
    return f"{MEMBERS}{replica:05d}/"


def beat(replica: int, incarnation: str) -> str:
    """Return the key of a lease."""
    return f"{member(replica)}{incarnation}/beat.json"


def claim(replica: int, number: int) -> str:
    """Return the key that a process creates to reserve the sequence number ``number``."""
    return f"{member(replica)}{number:05d}.claim"


def parse_claim(key: str) -> tuple[int, int] | None:
    """Return (replica, sequence number) of a claim's key, None for any other key."""
    match = re.fullmatch(r"members/([0-9]{5})/([0-9]{5})\.claim", key)
    return (int(match[1]), int(match[2])) if match else None


def parse_beat(key: str) -> tuple[int, str] | None:
    """Return (replica, incarnation) of a lease key, None for any other key."""
    match = re.fullmatch(r"members/([0-9]{5})/([0-9]{5}-[0-9a-f]{8})/beat\.json", key)
    return (int(match[1]), match[2]) if match else None


def round_dir(round: int) -> str:
    return f"{ROUNDS}{round:08d}/"


def awaited(round: int) -> str:
    """Return the key that asks replicas which still compute ``round`` for frequent heartbeats."""
    return f"{round_dir(round)}awaited"


def contributions(round: int) -> str:
    return f"{round_dir(round)}contributions/"


def round_of_contributions(prefix: str) -> int | None:
    """Return the round of :func:`contributions`, None for any other prefix."""
    match = re.fullmatch(r"rounds/([0-9]{8})/contributions/", prefix)
    return int(match[1]) if match else None


def contribution_payload(round: int, replica: int, incarnation: str, slice: int = 0) -> str:
    """Return the key of a payload, or of its slice ``slice`` if the writer had several ranks."""
    name = f"{contributions(round)}{replica:05d}.{incarnation}"
    return f"{name}.{slice:04d}.bin" if slice else f"{name}.bin"


def contribution_record(round: int, replica: int, incarnation: str) -> str:
    return f"{contributions(round)}{replica:05d}.{incarnation}.json"


def parse_contribution_record(key: str) -> tuple[int, int, str] | None:
    """Return (round, replica, incarnation) of a contribution record's key, None for any other
    key."""
    match = re.fullmatch(
        r"rounds/([0-9]{8})/contributions/([0-9]{5})\.([0-9]{5}-[0-9a-f]{8})\.json", key
    )
    return (int(match[1]), int(match[2]), match[3]) if match else None


def plan(round: int) -> str:
    return f"{round_dir(round)}plan.json"


def commit(round: int) -> str:
    return f"{round_dir(round)}commit.json"


def round_pack(first: int) -> str:
    """Return the key of the pack of the records of the rounds from ``first`` on
    (:mod:`diloco.protocol.packed_rounds`). Packs of another format get another folder than ``1``.
    """
    return f"{PACKS}1/{first:08d}.pack"


def round_of_record(key: str) -> int | None:
    """Return the round of the key of a contribution record, plan or commit, None for any other
    key."""
    match = _ROUND_RECORD.fullmatch(key)
    return int(match[1]) if match else None


def reduced(round: int) -> str:
    return f"{round_dir(round)}reduced/"


def reduced_shard(round: int, shard: int, digest: str) -> str:
    return f"{reduced(round)}{shard:05d}.{digest}"


def parse_reduced_shard(key: str) -> tuple[int, int, str] | None:
    """Return (round, shard, digest) of a reduced object's key, None for any other key."""
    match = re.fullmatch(r"rounds/([0-9]{8})/reduced/([0-9]{5})\.([0-9a-f]{64})", key)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def is_exchanged(key: str) -> bool:
    """Return whether a key of a round is that of a payload or a reduced shard."""
    return re.fullmatch(r"rounds/\d{8}/(contributions/[^/]+\.bin|reduced/[^/]+)", key) is not None


def is_temporary(key: str) -> bool:
    """Return whether an object of a round is deleted once two later checkpoints exist."""
    return is_exchanged(key) or re.fullmatch(r"rounds/\d{8}/awaited", key) is not None


def checkpoint_dir(round: int, replica: int, incarnation: str) -> str:
    return f"{CHECKPOINTS}{round:08d}/{replica:05d}.{incarnation}/"


def checkpoint_manifest(round: int) -> str:
    return f"{CHECKPOINTS}{round:08d}/manifest.json"


def parse_checkpoint_manifest(key: str) -> int | None:
    """Return the round of a checkpoint manifest's key, None for any other key."""
    match = re.fullmatch(r"checkpoints/([0-9]{8})/manifest\.json", key)
    return int(match[1]) if match else None


def replica_state(replica: int) -> str:
    return f"state/{replica:05d}/"


def replica_state_dir(replica: int, incarnation: str, round: int) -> str:
    return f"{replica_state(replica)}{incarnation}.{round:08d}/"


def replica_state_manifest(replica: int, incarnation: str, round: int) -> str:
    return f"{replica_state_dir(replica, incarnation, round)}manifest.json"


def parse_replica_state(key: str) -> tuple[int, str, int] | None:
    """Return (replica, incarnation, round) of a state manifest's key, None for any other key."""
    match = re.fullmatch(r"state/([0-9]{5})/([0-9]{5}-[0-9a-f]{8})\.([0-9]{8})/manifest\.json", key)
    return (int(match[1]), match[2], int(match[3])) if match else None


def telemetry_of(replica: int) -> str:
    return f"{TELEMETRY}{replica:05d}/"


def telemetry_pack(replica: int, incarnation: str, n: int) -> str:
    """Return the key of the pack that begins with segment ``n``."""
    return f"{telemetry_dir(replica, incarnation)}{n:08d}.pack"


def parse_telemetry_pack(key: str) -> tuple[int, str, int] | None:
    """Return (replica, incarnation, first number) of a pack's key, None for any other key."""
    match = re.fullmatch(r"telemetry/([0-9]{5})/([0-9]{5}-[0-9a-f]{8})/([0-9]{8})\.pack", key)
    return (int(match[1]), match[2], int(match[3])) if match else None


def telemetry_dir(replica: int, incarnation: str) -> str:
    return f"telemetry/{replica:05d}/{incarnation}/"


def telemetry(replica: int, incarnation: str, n: int) -> str:
    return f"telemetry/{replica:05d}/{incarnation}/{n:08d}.json"


def control(n: int) -> str:
    return f"{CONTROL}{n:08d}.json"


def parse_control(key: str) -> int | None:
    """Return the number of a command's key, None for any other key, such as one of the journal."""
    match = re.fullmatch(rf"{CONTROL}({_N})\.json", key)
    return int(match[1]) if match else None


def journal(n: int) -> str:
    return f"{JOURNAL}{n:08d}.json"


def parse_journal(key: str) -> int | None:
    """Return the number of a journal object's key, None for any other key."""
    match = re.fullmatch(r"control/journal/([0-9]{8})\.json", key)
    return int(match[1]) if match else None


def parse_commit(key: str) -> int | None:
    """Return the round of a commit's key, None for any other key."""
    match = re.fullmatch(r"rounds/([0-9]{8})/commit\.json", key)
    return int(match[1]) if match else None


def parse_telemetry(key: str) -> tuple[int, str, int] | None:
    """Return (replica, incarnation, number) of a segment's key, None for any other key."""
    match = re.fullmatch(r"telemetry/([0-9]{5})/([0-9]{5}-[0-9a-f]{8})/([0-9]{8})\.json", key)
    return (int(match[1]), match[2], int(match[3])) if match else None


def final_dir(replica: int, incarnation: str) -> str:
    return f"final/{replica:05d}.{incarnation}/"


def final_sample(replica: int, incarnation: str) -> str:
    return f"{final_dir(replica, incarnation)}sample.json"


def unit_plan() -> str:
    """Return the key of the division of an epoch into work units."""
    return f"{UNITS}plan.json"


def unit(epoch: int, number: int) -> str:
    return f"{UNITS}{epoch:06d}/{number:06d}/"


def unit_link(epoch: int, number: int, seq: int) -> str:
    """Return the key of link ``seq`` of a work unit's chain (:mod:`diloco.data.unit_records`)."""
    return f"{unit(epoch, number)}{seq:06d}.json"


def parse_unit_link(key: str) -> tuple[int, int, int] | None:
    """Return (epoch, unit, seq) of a link's key, None for any other key."""
    match = re.fullmatch(r"units/([0-9]{6})/([0-9]{6})/([0-9]{6})\.json", key)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def held_units(replica: int, incarnation: str) -> str:
    """Return the key of the list of units that a process holds."""
    return f"{HELD_UNITS}{replica:05d}.{incarnation}.json"


def parse_held_units(key: str) -> tuple[int, str] | None:
    """Return (replica, incarnation) of the key of a list of units, None for any other key."""
    match = re.fullmatch(r"units/held/([0-9]{5})\.([0-9]{5}-[0-9a-f]{8})\.json", key)
    return (int(match[1]), match[2]) if match else None


def evaluation(round: int, name: str) -> str:
    """Return the key of the result of an evaluation
    (:attr:`diloco.protocol.evaluation.EvaluationSpec.name`) of the weights after ``round``."""
    return f"{EVALUATIONS}{round:08d}.{name}.json"


def preflight(nonce: str, part: str = "") -> str:
    """Return a key for :mod:`diloco.preflight`; ``nonce`` (16 hex digits) separates concurrent
    checks."""
    return f"{PREFLIGHT}{nonce}{f'.{part}' if part else ''}"


# -- the type of a key ----------------------------------------------------------------------------


class Kind(StrEnum):
    """The type of object that a key of a run names."""

    OWNER = "owner"
    GROUP = "group"
    CODE = "code"
    LEASE = "lease"
    AWAITED = "awaited"
    CONTRIBUTION = "contribution"
    PLAN = "plan"
    COMMIT = "commit"
    REDUCED = "reduced"
    PACK = "pack"
    CHECKPOINT = "checkpoint"
    STATE = "state"
    TELEMETRY = "telemetry"
    CONTROL = "control"
    JOURNAL = "journal"
    FINAL = "final"
    UNIT = "unit"
    EVALUATION = "evaluation"
    PREFLIGHT = "preflight"


_N, _R, _U = "[0-9]{8}", "[0-9]{5}", "[0-9]{6}"
"""Patterns of a round or number, of a replica or shard, and of an epoch, a unit or a link."""
_I = _INCARNATION.pattern
_PIECE = r"\.[0-9]{5}"
_KINDS = {
    Kind.OWNER: r"owner\.json",
    Kind.GROUP: r"group\.json",
    Kind.CODE: r"code/[0-9a-f]{64}\.zip",
    Kind.LEASE: rf"members/{_R}/(?:{_I}/beat\.json|{_R}\.claim)",
    Kind.AWAITED: rf"rounds/{_N}/awaited",
    Kind.CONTRIBUTION: rf"rounds/{_N}/contributions/{_R}\.{_I}\.(?:(?:[0-9]{{4}}\.)?bin|json)",
    Kind.PLAN: rf"rounds/{_N}/plan\.json",
    Kind.COMMIT: rf"rounds/{_N}/commit\.json",
    Kind.REDUCED: rf"rounds/{_N}/reduced/{_R}\.[0-9a-f]{{64}}",
    Kind.PACK: rf"packs/1/{_N}\.pack",
    Kind.CHECKPOINT: (
        rf"checkpoints/{_N}/(?:manifest\.json"
        rf"|{_R}\.{_I}/(?:weights|outer)(?:{_PIECE})?\.safetensors)"
    ),
    Kind.STATE: (
        rf"state/{_R}/{_I}\.{_N}/(?:manifest\.json|[a-z0-9_-]{{1,32}}(?:{_PIECE})?\.safetensors)"
    ),
    Kind.TELEMETRY: rf"telemetry/{_R}/{_I}/{_N}\.(?:json|pack)",
    Kind.CONTROL: rf"control/{_N}\.json",
    Kind.JOURNAL: rf"control/journal/{_N}\.json",
    Kind.FINAL: (
        rf"final/(?:manifest\.json"
        rf"|{_R}\.{_I}/(?:model\.safetensors|(?:config|summary|sample)\.json))"
    ),
    Kind.UNIT: rf"units/(?:plan\.json|held/{_R}\.{_I}\.json|{_U}/{_U}/{_U}\.json)",
    Kind.EVALUATION: rf"evaluations/{_N}\.[0-9a-f]{{{EVALUATION_NAME_DIGITS}}}\.json",
    Kind.PREFLIGHT: r"preflight/[0-9a-f]{16}(?:\.(?:parts|create|race))?",
}
_KIND = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _KINDS.items()))
_FOLDERS = re.compile(
    rf"code|members(?:/{_R}(?:/{_I})?)?|rounds(?:/{_N}(?:/(?:contributions|reduced))?)?"
    rf"|packs(?:/1)?|checkpoints(?:/{_N}(?:/{_R}\.{_I})?)?|state(?:/{_R}(?:/{_I}\.{_N})?)?"
    rf"|telemetry(?:/{_R}(?:/{_I})?)?|control(?:/journal)?|final(?:/{_R}\.{_I})?|preflight"
    rf"|units(?:/held|/{_U}(?:/{_U})?)?|evaluations"
)


def kind_of(key: str) -> Kind | None:
    """Return the type of object of ``key``; None for a key outside the protocol."""
    match = _KIND.fullmatch(key)
    return Kind(str(match.lastgroup)) if match else None


def is_folder(path: str) -> bool:
    """Return whether the protocol has keys in the folder ``path``, which has no trailing slash."""
    return _FOLDERS.fullmatch(path) is not None


def is_weights_of(key: str, round: int) -> bool:
    """Return whether ``key`` can be the weights of a checkpoint of ``round``."""
    pattern = rf"checkpoints/{round:08d}/{_R}\.{_I}/weights\.safetensors"
    return re.fullmatch(pattern, key) is not None


def is_final_weights(key: str) -> bool:
    """Return whether ``key`` can be the weights of the final export."""
    return re.fullmatch(rf"final/{_R}\.{_I}/model\.safetensors", key) is not None


# -- diloco.allreduce, which runs without a group -------------------------------------------------


def allreduce(round_id: str) -> str:
    return f"allreduce/{round_id}/"


def allreduce_session(round_id: str, rank: int) -> str:
    return f"{allreduce(round_id)}sessions/{rank:05d}.json"


def allreduce_payload(round_id: str, group: str, call: int, rank: int) -> str:
    return f"{allreduce(round_id)}{group}/{call:08d}/{rank:05d}.bin"


def parse_allreduce_payload(key: str) -> tuple[str, str, int, int] | None:
    """Return (round id, group, call, rank) of a payload's key, None for any other key."""
    match = re.fullmatch(r"allreduce/([^/]+)/([0-9a-f]{32})/([0-9]{8})/([0-9]{5})\.bin", key)
    return (match[1], match[2], int(match[3]), int(match[4])) if match else None
