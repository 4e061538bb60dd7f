"""Checks the invariants of a run from the bucket's bytes.

It shares no code with the library except the layout of keys and payloads in ``docs/protocol.md``:
records are read as plain JSON, payloads decoded and rounds replayed with NumPy.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Array = NDArray[np.float32]

HEADER = 256
BLOCK = 256
"""Elements of a block, as the harness sets them."""
HUNG_AFTER = 8
MOST_WORK = 3
STEADY_ROUNDS, MOST_AWAY = 1, 1 / 2
"""When a late replica is away, as the harness sets it."""
SEAL = b" \t\n"
"""The characters of the checksum after a record."""
LONGEST_DELAY = 8
"""Rounds after which a share of a step is too small to be recognised."""
TOLERANCE = 1e-2
"""Tolerance of a step's share in a contribution: each round, and int8, round local weights."""


class Violation(AssertionError):
    """An invariant does not hold."""


def check(
    objects: dict[str, bytes],
    written: dict[str, bytes],
    written_s: dict[str, float],
    settings: dict[str, Any],
    *,
    swept_s: float,
    list_lag_s: float = 0.0,
    damaged: Collection[str] = (),
) -> Log:
    """Check all invariants. Raises :class:`Violation`.

    ``objects`` is the content of the bucket at the end, ``written`` the last bytes stored under
    each key, ``written_s`` their time, including deleted objects. The last successful sweep began
    at ``swept_s``; a listing is at most ``list_lag_s`` old. ``damaged`` are the keys whose bytes a
    fault has changed.
    """
    log = Log(written, settings)
    log.replay()
    log.check_steps()
    check_result(objects, written, log)
    in_time = {k: v for k, v in objects.items() if written_s[k] < swept_s - list_lag_s}
    check_leftovers(objects, in_time, written)
    check_states(objects, written_s, list_lag_s=list_lag_s)
    check_packs(objects, written, damaged)
    return log


def works_of(plan: dict[str, Any], before: dict[str, Any] | None, keep: float) -> list[float]:
    """The rounds of work in each contribution of a plan: nine at most with a share of 0.5, of a
    replica that was away by the plan before or is not in it; else one."""
    most = max(HUNG_AFTER + 1, 1 / (1 - keep)) if keep < 1 else float("inf")
    known = {late["replica"]: late["away"] for late in before["late"]} if before else {}
    known |= {c["replica"]: False for c in before["contributions"]} if before else {}
    return [
        min(c["rounds"], most) if known.get(c["replica"], True) else 1
        for c in plan["contributions"]
    ]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Log:
    """The committed rounds, replayed. ``digests`` are those of each fragment after each round."""

    def __init__(self, written: dict[str, bytes], settings: dict[str, Any]) -> None:
        self.written = written
        self.settings = settings
        self.fragments = settings["num_fragments"]
        self.commits: dict[int, dict[str, Any]] = {}
        self.weights: list[Array] = []
        self.momentum: list[Array] = []
        self.digests: dict[tuple[int, int], str] = {}
        self.taken: list[tuple[int, str, int, Array]] = []
        self.missed: dict[int, int] = {}

    def json(self, key: str) -> dict[str, Any]:
        require(key in self.written, f"{key}: was never written")
        result = json.loads(self.written[key])
        assert isinstance(result, dict)
        return result

    def replay(self) -> None:
        self._begin()
        committed, tokens, round = 0, 0, 1
        base_of = dict.fromkeys(range(self.fragments), 0)
        while f"rounds/{round:08d}/commit.json" in self.written:
            commit = self.json(f"rounds/{round:08d}/commit.json")
            plan = self.json(f"rounds/{round:08d}/plan.json")
            fragment = (round - 1) % self.fragments
            where = f"round {round}"
            require(
                (commit["round"], plan["round"], commit["fragment"], plan["fragment"])
                == (round, round, fragment, fragment),
                f"{where}: commit or plan is of another round or fragment",
            )
            members = [(c["replica"], c["incarnation"]) for c in plan["contributions"]]
            numbers = [replica for replica, _ in members]
            require(numbers == sorted(set(numbers)), f"{where}: a replica is in it twice")
            named = [(c["replica"], c["incarnation"]) for c in commit["contributors"]]
            unread = f"rounds/{round:08d}/plan.json" in commit["void"]
            require(
                named == members or (unread and not named),
                f"{where}: commit and plan have other contributors",
            )
            self._check_weights(round, plan)
            if not commit["void"]:
                committed += 1
                tokens += sum(c["new_tokens"] for c in plan["contributions"])
                self._apply(round, fragment, plan, base_of[fragment])
                base_of[fragment] = round
            require(
                (commit["committed_total"], commit["tokens_total"]) == (committed, tokens),
                f"{where}: totals are {commit['committed_total']} and {commit['tokens_total']}, "
                f"expected {committed} and {tokens}",
            )
            self.commits[round] = commit
            self.digests |= {(round, f): _digest(w) for f, w in enumerate(self.weights)}
            if commit["last"]:
                break
            round += 1
        numbers = sorted(
            int(match[1])
            for key in self.written
            if (match := re.fullmatch(r"rounds/(\d{8})/commit\.json", key))
        )
        require(numbers == list(range(1, len(numbers) + 1)), f"the log has a hole: {numbers}")
        require(len(numbers) == len(self.commits), "rounds were committed after the last one")

    def _begin(self) -> None:
        manifest = self.json("checkpoints/00000000/manifest.json")
        tensors = _safetensors(self.written[manifest["weights"]["key"]])
        self._check_stored(manifest["weights"])
        self.slots = _fragments([(t["name"], t["shape"]) for t in manifest["tensors"]], self)
        self.weights = [
            np.concatenate([tensors[name].ravel() for name in names]) for names in self.slots
        ]
        self.momentum = [np.zeros_like(w) for w in self.weights]
        self.digests |= {(0, f): _digest(w) for f, w in enumerate(self.weights)}

    def _check_stored(self, stored: dict[str, Any]) -> None:
        data = self.written[stored["key"]]
        checksums = "".join(
            xxhash.xxh3_64_hexdigest(data[start : start + 2**24])
            for start in range(0, len(data), 2**24)
        )
        require(stored["checksums"] == checksums, f"{stored['key']}: wrong checksums")

    def _apply(self, round: int, fragment: int, plan: dict[str, Any], base_round: int) -> None:
        mean = np.zeros_like(self.weights[fragment])
        for c in plan["contributions"]:
            name = f"{c['replica']:05d}.{c['incarnation']}"
            key = f"rounds/{round:08d}/contributions/{name}"
            record = self.json(f"{key}.json")
            require(
                record["base_round"] == base_round
                and record["base_digest"] == self.digests[base_round, fragment],
                f"{key}: counted, though it stands on round {record['base_round']} with other "
                f"weights than the log's",
            )
            body = _blocks(self.written[f"{key}.bin"], self.settings["codec"], mean.size, key)
            vector = _decode(body, self.settings["codec"], mean.size)
            mean += vector * np.float32(c["weight"])
            self.taken.append((round, name, fragment, vector))
        if self.settings["codec"] == "bf16":
            mean = _rounded_to_bf16(mean)  # the mean passes through the reduced codec
        momentum = np.float32(self.settings["outer_momentum"])
        buffer = self.momentum[fragment]
        buffer *= momentum
        buffer += mean
        update = buffer * momentum
        update += mean
        update *= np.float32(self.settings["outer_lr"])
        self.weights[fragment] -= update

    def _check_weights(self, round: int, plan: dict[str, Any]) -> None:
        """Check that all live replicas divide the weights, so that a round of work enters once. The
        room of a late one shrinks like its work: by a factor for each further missed round of the
        fragment. One that is away has none.
        """
        where = f"round {round}"
        is_kept = self.settings["late_keep"] > 0 and self.settings["world_size_mode"] == "dynamic"
        by_tokens = self.settings["weighting"] == "tokens"
        late = {entry["replica"]: entry for entry in plan["late"]}
        decided = {c["replica"] for c in (*plan["contributions"], *plan["refused"])}
        require(not late or is_kept, f"{where}: the weights leave room for work that is dropped")
        require(len(late) == len(plan["late"]), f"{where}: a replica is late twice")
        require(not decided & late.keys(), f"{where}: a replica is decided and late")
        room = 0.0
        for replica, entry in late.items():
            beats = f"members/{replica:05d}/"
            require(any(key.startswith(beats) for key in self.written), f"{where}: {replica} late")
            before = self.missed.get(replica, 0)  # a damaged plan is unknown to later planners
            require(1 <= entry["missed"] <= before + 1, f"{where}: missed {entry['missed']}")
            self.missed[replica] = max(before, entry["missed"])
            require(entry["units"] > 0 and (by_tokens or entry["units"] == 1), f"{where}: units")
            if entry["away"]:
                self._check_away(plan, entry)
            elif entry["missed"] <= HUNG_AFTER:
                earlier = len(range(self.fragments, entry["missed"], self.fragments))
                room += entry["units"] * self.settings["late_keep"] ** earlier
        units = [c["tokens"] / c["rounds"] if by_tokens else 1.0 for c in plan["contributions"]]
        least, keep = [0.0], self.settings["late_keep"]
        if self.fragments == 1:
            earlier = self.written.get(f"rounds/{round - 1:08d}/plan.json")
            least = [
                sum(u * w for u, w in zip(units, works_of(plan, before, keep), strict=True))
                / MOST_WORK
                for before in ((json.loads(earlier), None) if earlier else (None,))
            ]
        sums = [max(sum(units) + room, at_least) for at_least in least]
        for c, unit in zip(plan["contributions"], units, strict=True):
            require(
                any(abs(c["weight"] - unit / total) < 1e-12 for total in sums),
                f"{where}: {c['replica']} has weight {c['weight']}, expected {unit} / {sums}",
            )

    def _check_away(self, plan: dict[str, Any], entry: dict[str, Any]) -> None:
        """Check that the replica was away before, or that no other became late for some rounds."""
        where = f"round {plan['round']}: {entry['replica']} is away"
        require(self.fragments == 1, f"{where} from one fragment")
        before = json.loads(self.written[f"rounds/{plan['round'] - 1:08d}/plan.json"])
        was_late = {late["replica"]: late["away"] for late in before["late"]}
        is_steady = before["steady_rounds"] >= STEADY_ROUNDS
        require(was_late.get(entry["replica"], is_steady), where)
        late = len(plan["late"])
        require(late <= MOST_AWAY * (late + len(plan["contributions"])), f"{where}, as many others")

    def check_steps(self) -> None:
        """Check that every step is in at most one committed contribution: as a power of the share
        that a late replica keeps, one factor for each round that it missed but the first in a row;
        unless overlap mixes.

        The steps of replicas change separate elements, so no progress is along a round's mean.
        """
        keep = self.settings["late_keep"]
        shares = np.array([0.0, *(keep**missed for missed in range(LONGEST_DELAY))])
        totals = [np.zeros(w.size, np.float64) for w in self.weights]
        mixes = self.settings["overlap_steps"] > 0 and self.settings["mixing_alpha"] < 1
        for round, name, fragment, vector in self.taken:
            share = -vector.astype(np.float64)
            low, high = share.min(initial=0.0), share.max(initial=0.0)
            require(
                low > -TOLERANCE and high < 1 + TOLERANCE,
                f"round {round}: {name} holds a step {high:.3f} or {low:.3f} times",
            )
            if not mixes:
                odd = abs(share[:, None] - shares).min(axis=1).max(initial=0.0)
                require(odd < TOLERANCE, f"round {round}: {name} holds {odd:.3f} of a step")
            totals[fragment] += share
        most = max(total.max(initial=0.0) for total in totals)
        require(most < 1 + 2 * TOLERANCE, f"a step counts {most:.3f} times")

    def check_lost(self, steps: list[int], who: tuple[int, str], *, tail: int) -> None:
        """Check that the log contains all ``steps`` but the last of a process that saw the end of
        the run.

        The work of a late contribution moves to the next one, with the share that is kept for each
        missed round. A process that is late until the end has no next one: then all steps before
        the newest one in the log must be included.
        """
        missed = sum(
            not commit["void"] and who[0] not in [c["replica"] for c in commit["contributors"]]
            for commit in self.commits.values()
        )
        least = self.settings["late_keep"] ** max(0, missed - 1)
        totals = [np.zeros(w.size, np.float64) for w in self.weights]
        for _, _, fragment, vector in self.taken:
            totals[fragment] -= vector
        shares = [(step, *self._share(step, totals)) for step in steps if self._has_place(step)]
        if self._took_to_the_end(who):
            kept = set(steps[: max(0, len(steps) - tail)])
        else:
            newest = {f: step for step, f, share in shares if share > least / 2}
            kept = {step for step, f, _ in shares if step < newest.get(f, 0)}
        for step, _, share in shares:
            require(
                step not in kept or share > least - 2 * TOLERANCE,
                f"step {step} is lost: {share:.3f} of it is in the log",
            )

    def _has_place(self, step: int) -> bool:
        return step < 512 * sum(len(names) for names in self.slots)

    def _share(self, step: int, totals: list[NDArray[np.float64]]) -> tuple[int, float]:
        """Return the fragment of a step's coordinate, and the included share of the step."""
        tensors = sum(len(names) for names in self.slots)
        tensor, at = step % tensors, step // tensors
        fragment = tensor % self.fragments
        return fragment, float(totals[fragment][tensor // self.fragments * 512 + at])

    def _took_to_the_end(self, who: tuple[int, str]) -> bool:
        """Return whether the last round of every fragment included a contribution of this
        process."""
        last = sorted(self.commits)[-self.fragments :]
        return all(
            who in [(c["replica"], c["incarnation"]) for c in self.commits[round]["contributors"]]
            for round in last
        )


def check_result(objects: dict[str, bytes], written: dict[str, bytes], log: Log) -> None:
    """Check that the final weights and all checkpoints match the log."""
    final = log.json("final/manifest.json")
    last = log.commits[max(log.commits)]
    require(bool(last["last"]), "the run ended before its last round")
    require(final["round"] <= last["round"], "the result is of a later round than the last")
    tensors = _safetensors(objects[final["weights"]["key"]])
    for fragment, names in enumerate(log.slots):
        result = np.concatenate([tensors[name].ravel() for name in names])
        require(
            result.tobytes() == log.weights[fragment].tobytes(),
            f"the final weights of fragment {fragment} are not the log's",
        )
    for key in sorted(written):
        if match := re.fullmatch(r"checkpoints/(\d{8})/manifest\.json", key):
            manifest, round = log.json(key), int(match[1])
            tensors = _safetensors(written[manifest["weights"]["key"]])
            for fragment, names in enumerate(log.slots):
                result = np.concatenate([tensors[name].ravel() for name in names])
                require(
                    _digest(result) == log.digests[round, fragment],
                    f"checkpoint {round} has other weights than the log in fragment {fragment}",
                )


def check_leftovers(
    objects: dict[str, bytes], in_time: dict[str, bytes], written: dict[str, bytes]
) -> None:
    """Check that of the objects written ``in_time`` nothing large is left but the newest two
    checkpoints, the exchanged objects after the older of them, and the result."""
    rounds = sorted(
        int(match[1])
        for key in objects
        if (match := re.fullmatch(r"checkpoints/(\d{8})/manifest\.json", key))
    )
    older = rounds[-2] if len(rounds) > 1 else -1
    left = [
        key
        for key in in_time
        if (match := re.fullmatch(r"rounds/(\d{8})/(?:contributions/.*\.bin|reduced/.*)", key))
        and int(match[1]) <= older
    ]
    left += [
        key
        for key in in_time
        if (match := re.fullmatch(r"checkpoints/(\d{8})/.*\.safetensors", key))
        and int(match[1]) < older
    ]
    winner = json.loads(written["final/manifest.json"])["writer"]
    own = f"final/{winner['replica']:05d}.{winner['incarnation']}/"
    left += [
        key
        for key in in_time
        if key.startswith("final/") and key != "final/manifest.json" and not key.startswith(own)
    ]
    require(not left, f"{len(left)} objects are left behind: {', '.join(sorted(left)[:5])}")


def check_states(
    objects: dict[str, bytes], written_s: dict[str, float], *, list_lag_s: float
) -> None:
    """Check that old saved states were deleted.

    Each save deletes all older ones of its replica number but one. A process that has saved again
    was not killed between its previous save and the sweep that follows it. So of the saves that
    this sweep could list, at most one older save is left. Later ones, and those of a process that
    was killed before its sweep, stay until the next save.
    """
    saved: dict[str, list[tuple[float, str]]] = {}
    for key, when_s in written_s.items():
        if match := re.fullmatch(r"state/(\d{5})/([^/]+)/manifest\.json", key):
            saved.setdefault(match[1], []).append((when_s, match[2]))
    for replica, saves in saved.items():
        saves.sort()
        swept = [
            (when_s, name)
            for at, (when_s, name) in enumerate(saves)
            if any(later.split(".")[0] == name.split(".")[0] for _, later in saves[at + 1 :])
        ]
        if not swept:
            continue
        when_s, newest = swept[-1]
        folders: dict[str, float] = {}
        for key in objects:
            if match := re.match(rf"state/{replica}/([^/]+)/", key):
                folders[match[1]] = max(folders.get(match[1], 0.0), written_s[key])
        older = [name for name, s in folders.items() if name < newest and s < when_s - list_lag_s]
        require(
            len(older) <= 1,
            f"replica {replica} leaves {len(older)} states that are older than {newest}: {older}",
        )


def check_packs(
    objects: dict[str, bytes], written: dict[str, bytes], damaged: Collection[str]
) -> None:
    """Check that plans and commits are under their own keys, and each contribution record under its
    own or with the same bytes in a pack; except for what a fault has damaged. A record that was cut
    after its last brace has lost its checksum alone, and is intact."""
    packed: set[str] = set()
    packs = {
        int(match[1]): key
        for key in objects
        if (match := re.fullmatch(r"packs/1/(\d{8})\.pack", key))
    }
    for first, key in packs.items():
        if key in damaged:
            continue
        records = _unpacked(objects[key])
        rounds = {int(name.split("/")[1]) for name in records}
        require(rounds == set(range(first, first + len(rounds))), f"{key} has rounds {rounds}")
        for round in rounds:
            for name in ("plan.json", "commit.json"):
                require(f"rounds/{round:08d}/{name}" in records, f"{key} lacks {name} of {round}")
        for name, data in records.items():
            found, expected = data, written.get(name, b"")
            if name in damaged:
                found, expected = found.rstrip(SEAL), expected.rstrip(SEAL)
            require(found == expected, f"{key} has other bytes of {name}")
        packed |= records.keys()
    for key in sorted(written.keys() - objects.keys()):
        require(not re.fullmatch(r"rounds/\d{8}/(plan|commit)\.json", key), f"{key} was deleted")
        if key in packed or key in damaged:
            continue
        if match := re.fullmatch(r"rounds/(\d{8})/contributions/.*\.json", key):
            pack = packs.get(max((n for n in packs if n <= int(match[1])), default=0), "a pack")
            require(pack in damaged, f"{key} was deleted and is not in {pack}")


# -- formats, as docs/protocol.md has them ---------------------------------------------------------


def _safetensors(data: bytes) -> dict[str, Array]:
    length = int.from_bytes(data[:8], "little")
    result = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        start, stop = entry["data_offsets"]
        body = data[8 + length + start : 8 + length + stop]
        result[name] = np.frombuffer(body, np.float32).reshape(entry["shape"])
    return result


def _unpacked(data: bytes) -> dict[str, bytes]:
    raw = zlib.decompress(data)
    start = 4 + int.from_bytes(raw[:4], "big")
    header = json.loads(raw[4:start])
    records = {}
    for name, size in zip(header["keys"], header["sizes"], strict=True):
        records[name] = raw[start : start + size]
        start += size
    require(start == len(raw), f"the pack of round {header['first']} has other sizes")
    return records


def _fragments(tensors: list[tuple[str, list[int]]], log: Log) -> list[list[str]]:
    """Tensor i is in fragment i mod P: each tensor of the model is a separate layer."""
    return [
        [name for index, (name, _) in enumerate(tensors) if index % log.fragments == fragment]
        for fragment in range(log.fragments)
    ]


def _blocks(payload: bytes, codec: str, numel: int, key: str) -> bytes:
    """Return the body of a payload without the checksums of its blocks, which must be right."""
    seed, position, bodies = xxhash.xxh3_64_intdigest(payload[:HEADER]), HEADER, b""
    for block, start in enumerate(range(0, numel, BLOCK)):
        elements = min(BLOCK, numel - start)
        stop = position + {"fp32": 4 * elements, "bf16": 2 * elements, "int8": 260}[codec]
        checksum = xxhash.xxh3_64_digest(payload[position:stop], (seed + block) % 2**64)
        require(payload[stop : stop + 8] == checksum, f"{key}: wrong checksum of block {block}")
        bodies, position = bodies + payload[position:stop], stop + 8
    return bodies


def _decode(body: bytes, codec: str, numel: int) -> Array:
    if codec == "fp32":
        return np.frombuffer(body, np.float32).copy()
    if codec == "bf16":
        return (np.frombuffer(body, np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert codec == "int8" and numel % 256 == 0
    rows = np.frombuffer(body, np.uint8).reshape(-1, 260)
    scale = rows[:, :4].copy().view(np.float32)
    return (rows[:, 4:].view(np.int8).astype(np.float32) * scale).ravel()


def _rounded_to_bf16(vector: Array) -> Array:
    """Round to nearest even."""
    bits = vector.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def _digest(weights: Array) -> str:
    return hashlib.sha256(xxhash.xxh3_128_digest(weights.tobytes())).hexdigest()
