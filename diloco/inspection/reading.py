"""Reads a run from its bucket with few, parallel requests.

Only objects that are shown are read. Commits are contiguous, so a galloping search finds the
newest. For each shown round its folder is listed and its plan and commit are read. Telemetry is
read from its end (:mod:`diloco.inspection.telemetry`). Only ``whole`` lists all objects to add up
their sizes, most of which are a long run's telemetry.

Errors: :class:`NotARun` if there is no group of this protocol under the URI, and those of the
store. An invalid object is listed in the picture and otherwise ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from diloco.inspection import telemetry
from diloco.inspection.picture import (
    CheckpointPicture,
    FinalPicture,
    ObservedLease,
    Picture,
    RoundPicture,
    Size,
    StoredContribution,
    Unreadable,
)
from diloco.inspection.reader import Reader, find_last
from diloco.protocol import keys
from diloco.protocol.group_document import GroupDocument, ProtocolMismatch
from diloco.protocol.packed_rounds import PackedRounds
from diloco.protocol.pieces import keys_of
from diloco.protocol.records import (
    CheckpointManifest,
    Command,
    Commit,
    ContributionRecord,
    FinalManifest,
    Plan,
    StoredObject,
)
from diloco.protocol.settings import GroupSettings, SettingsError
from diloco.store.base import MissingKey, ObjectInfo, Store

CHECKPOINTS = 8
"""Newest checkpoints that are shown; two are always complete."""


class NotARun(ValueError):
    """There is no group under the URI that this version can read."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The rounds to show: ``first`` to ``last`` (None: the newest), or the ``newest`` so many.
    ``whole`` sums the sizes of all objects."""

    first: int | None = None
    last: int | None = None
    newest: int = 20
    whole: bool = False


def read_document(store: Store) -> GroupDocument:
    """Return the group document. Raises :class:`NotARun`."""
    try:
        return GroupDocument.read(store)
    except MissingKey:
        raise NotARun(f"expected a run at {store.uri}, found no {keys.GROUP}") from None
    except (ProtocolMismatch, SettingsError) as error:
        raise NotARun(str(error)) from None


def read_picture(
    store: Store,
    document: GroupDocument,
    pool: ThreadPoolExecutor,
    *,
    scope: Scope,
    leases: tuple[ObservedLease, ...],
) -> Picture:
    """Read everything except ``leases``, which the caller has already observed."""
    reader = Reader(store, pool)
    hint = max((lease.beat.round for lease in leases), default=1)
    newest = find_last(lambda n: reader.exists(keys.commit(n)), hint=hint)
    first, last = _range(scope, newest, document.settings)
    rounds = _read_rounds(reader, range(first, last + 1), newest, document.settings)
    newest_commit = next((r.commit for r in rounds if r.round == newest), None)
    if newest_commit is None and newest:
        newest_commit = reader.read(keys.commit(newest), Commit)
    listed = {prefix: store.list(prefix) for prefix in (keys.CHECKPOINTS, "state/", "final/")}
    checkpoints, unfinished = _read_checkpoints(reader, listed[keys.CHECKPOINTS])
    telemetry_tail = telemetry.read(reader, leases, first=first)
    sizes = _sizes(
        _every_object(store) if scope.whole else [i for found in listed.values() for i in found]
    )
    if not scope.whole:
        for shown in rounds:
            for kind, size in shown.sizes.items():
                sizes[kind] = _add(sizes.get(kind), size)
    return Picture(
        uri=store.uri,
        document=document,
        leases=leases,
        newest=newest_commit,
        rounds=rounds,
        checkpoints=checkpoints,
        unfinished_checkpoints=unfinished,
        final=_read_final(reader, listed["final/"]),
        commands=_read_commands(reader),
        saved_states=_saved_states(listed["state/"]),
        reports=tuple(r for r in telemetry_tail.reports if first <= r.report.round <= last),
        evaluations=telemetry_tail.evaluations,
        truncated=telemetry_tail.truncated,
        sizes=sizes,
        whole=scope.whole,
        unreadable=tuple(sorted(set(reader.unreadable), key=lambda bad: bad.key)),
    )


def _every_object(store: Store) -> list[ObjectInfo]:
    return [info for page in store.list_pages("") for info in page]


def _range(scope: Scope, newest: int, settings: GroupSettings) -> tuple[int, int]:
    """Return the first and last round to show; with overlap several rounds can be in flight."""
    ahead = newest + 1 + -(-settings.overlap_steps // settings.round_steps)
    last = ahead if scope.last is None else min(scope.last, ahead)
    first = max(1, newest + 1 - scope.newest) if scope.first is None else scope.first
    return first, last


def _read_rounds(
    reader: Reader, numbers: range, newest: int, settings: GroupSettings
) -> tuple[RoundPicture, ...]:
    folders = list(reader.pool.map(lambda n: reader.store.list(keys.round_dir(n)), numbers))
    shown = [(n, found) for n, found in zip(numbers, folders, strict=True) if found or n <= newest]
    plans = reader.read_all((keys.plan(n) for n, _ in shown), Plan)
    commits = reader.read_all((keys.commit(n) for n, _ in shown), Commit)
    packs = PackedRounds(reader.store)
    pictures = []
    for (n, found), plan, commit in zip(shown, plans, commits, strict=True):
        record_keys = [i.key for i in found if keys.parse_contribution_record(i.key)]
        if plan and commit and _lacks_planned(plan, record_keys):
            record_keys = sorted({*record_keys, *packs.packed_contributions(n)})
        open_keys = [] if plan or commit else record_keys
        records = [r for r in reader.read_all(open_keys, ContributionRecord) if r is not None]
        known = commit or plan or (records[0] if records else None)
        pictures.append(
            RoundPicture(
                round=n,
                fragment=known.fragment if known else (n - 1) % settings.num_fragments,
                plan=plan,
                commit=commit,
                arrived=_arrived(record_keys, {info.key for info in found}),
                records=tuple(records),
                reduced=tuple(
                    sorted({s[1] for i in found if (s := keys.parse_reduced_shard(i.key))})
                ),
                sizes=_sizes(found),
            )
        )
    reader.unreadable += [
        Unreadable(key=key, reason=str(error)) for key, error in packs.take_refused()
    ]
    return tuple(pictures)


def _lacks_planned(plan: Plan, record_keys: Iterable[str]) -> bool:
    """Return whether a planned contribution has no record of its own any more."""
    listed = set(map(keys.parse_contribution_record, record_keys))
    return any((plan.round, c.replica, c.incarnation) not in listed for c in plan.contributions)


def _arrived(record_keys: Iterable[str], present: set[str]) -> tuple[StoredContribution, ...]:
    """Return the contribution of each replica's newest incarnation."""
    found: dict[int, StoredContribution] = {}
    for key in sorted(record_keys):
        parsed = keys.parse_contribution_record(key)
        assert parsed is not None
        found[parsed[1]] = StoredContribution(
            replica=parsed[1],
            incarnation=parsed[2],
            payload=keys.contribution_payload(*parsed) in present,
        )
    return tuple(found.values())


def _read_checkpoints(
    reader: Reader, listed: list[ObjectInfo]
) -> tuple[tuple[CheckpointPicture, ...], tuple[int, ...]]:
    """Return the newest checkpoints, and the rounds with objects but no manifest."""
    present = {info.key for info in listed}
    rounds = sorted(r for key in present if (r := keys.parse_checkpoint_manifest(key)) is not None)
    started = {int(key.split("/")[1]) for key in present if key.split("/")[1].isdigit()}
    numbers = rounds[-CHECKPOINTS:]
    manifests = reader.read_all(map(keys.checkpoint_manifest, numbers), CheckpointManifest)
    pictures = tuple(
        CheckpointPicture(manifest=m, missing=_missing((m.weights, m.outer), present))
        for m in manifests
        if m is not None
    )
    return pictures, tuple(sorted(started - set(rounds)))


def _read_final(reader: Reader, listed: list[ObjectInfo]) -> FinalPicture | None:
    manifest = reader.read(keys.FINAL_MANIFEST, FinalManifest)
    if manifest is None:
        return None
    named = (manifest.weights, manifest.config, manifest.summary)
    return FinalPicture(manifest=manifest, missing=_missing(named, {i.key for i in listed}))


def _missing(named: Iterable[StoredObject | None], present: set[str]) -> tuple[str, ...]:
    return tuple(key for stored in named if stored for key in keys_of(stored) if key not in present)


def _read_commands(reader: Reader) -> tuple[Command, ...]:
    count = find_last(lambda n: reader.exists(keys.control(n)), hint=1)
    found = reader.read_all(map(keys.control, range(1, count + 1)), Command)
    return tuple(command for command in found if command is not None)


def _saved_states(listed: list[ObjectInfo]) -> dict[int, int]:
    """Return the newest round after which each replica saved its state."""
    saved: dict[int, int] = {}
    for info in listed:
        if parsed := keys.parse_replica_state(info.key):
            saved[parsed[0]] = max(parsed[2], saved.get(parsed[0], 0))
    return saved


def _sizes(listed: Iterable[ObjectInfo]) -> dict[str, Size]:
    objects: Counter[str] = Counter()
    total_bytes: Counter[str] = Counter()
    for info in listed:
        kind = kind_of(info.key)
        objects[kind] += 1
        total_bytes[kind] += info.size_bytes
    return {kind: Size(objects=objects[kind], bytes=total_bytes[kind]) for kind in sorted(objects)}


def _add(a: Size | None, b: Size) -> Size:
    return b if a is None else Size(objects=a.objects + b.objects, bytes=a.bytes + b.bytes)


def kind_of(key: str) -> str:
    """Return the category of an object, for the sum of sizes."""
    top = key.split("/", 1)[0]
    if top != "rounds":
        names = {
            "group.json": "settings",
            "members": "leases",
            "packs": "records",
            "state": "replica states",
        }
        return names.get(top, top)
    if key.endswith(".bin"):
        return "payloads"
    return "reduced" if "/reduced/" in key else "records"
