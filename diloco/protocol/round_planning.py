"""Builds the plan of a round: screens contributions, computes the grace window. Pure functions;
:mod:`diloco.protocol.round_decision` calls them. :mod:`diloco.protocol.round_weights` computes the
weights."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from diloco.protocol.blocks import HEADER_BYTES, MAX_SLICES, block_elements, slice_count
from diloco.protocol.payload_size import checked_bytes
from diloco.protocol.records import ContributionRecord, Plan, PlannedContribution, Refusal
from diloco.protocol.reduce_cost import cheapest_plan, shards_per_owner
from diloco.protocol.round_view import GATHER, SHARDED, SYNCER, RoundView
from diloco.protocol.round_weights import (
    MAX_COUNTED,
    late_replicas,
    plan_before,
    steady_rounds,
    weights_of,
)

FEWEST_FOR_OUTLIERS = 4
"""Contributions needed for outlier rejection: a median of fewer norms is not meaningful."""
NORM_TOLERANCE = 1e-6
"""Relative rounding error between a contribution's norm and the norm of its per-tensor norms."""
LEAST_SPREAD = 0.05
"""Minimum spread of the norms for outlier rejection, as a fraction of their median."""


def screen(view: RoundView) -> tuple[list[ContributionRecord], list[Refusal]]:
    """Return the contributions that can be averaged, sorted by replica, and the refusals.

    A contribution without tokens is in neither list.
    """
    accepted: list[ContributionRecord] = []
    refused: list[Refusal] = []
    agreed = _agreed_digest(view)
    for replica in sorted(view.contributions):
        record = view.contributions[replica]
        reason = _mismatch(view, record, agreed)
        if replica == view.excluded_replica:
            reason = "its payloads voided the last two rounds, because they could not be read"
        if reason:
            refused.append(_refusal(record, reason))
        elif record.tokens > 0 and record.steps > 0:
            accepted.append(record)
    for reject in (_outliers, _fresh, _spares):
        refusals = reject(view, accepted)
        refused += refusals
        refused_replicas = {refusal.replica for refusal in refusals}
        accepted = [record for record in accepted if record.replica not in refused_replicas]
    return accepted, sorted(refused, key=lambda refusal: refusal.replica)


def _agreed_digest(view: RoundView) -> str:
    """Return the digest of the base weights that most contributions have; in a draw the observer's
    own."""
    digests = Counter(
        c.base_digest for c in view.contributions.values() if c.base_round == view.base_round
    )
    return max(digests, key=lambda d: (digests[d], d == view.base_digest), default="")


def _mismatch(view: RoundView, record: ContributionRecord, agreed_digest: str) -> str:
    """Return the mismatch between a contribution and the round, or '' for a valid one."""
    for name, expected, found in (
        ("model", view.model_hash, record.model_hash),
        ("round", view.round, record.round),
        ("fragment", view.fragment, record.fragment),
        ("codec", view.settings.codec, record.codec),
        ("number of elements", view.numel, record.numel),
        ("base round", view.base_round, record.base_round),
        ("digest of the base weights", agreed_digest, record.base_digest),
    ):
        if expected != found:
            return f"expected {name} {expected}, found {found}"
    for name, count, length in (
        ("norms", view.tensors, len(record.norms)),
        ("bytes", payload_size(view), record.size_bytes),
    ):
        if count != length:
            return f"expected {count} {name}, found {length}"
    if not all(map(math.isfinite, (record.norm, record.loss, *record.norms))):
        return f"expected a finite pseudo-gradient, found norm {record.norm} and loss {record.loss}"
    tensors_norm = math.hypot(*record.norms)
    if min(record.norms) < 0 or not math.isclose(record.norm, tensors_norm, rel_tol=NORM_TOLERANCE):
        return f"expected norm {tensors_norm:.6g}, that of all tensors, found {record.norm}"
    claims: tuple[tuple[str, float], ...] = (
        ("tokens", record.tokens),
        ("new tokens", record.new_tokens),
        ("steps", record.steps),
        ("compute seconds", record.compute_s),
    )
    for name, claimed in claims:
        if not 0 <= claimed <= MAX_COUNTED:
            return f"expected {name} from 0 to {MAX_COUNTED:,}, found {claimed}"[:200]
    if not 1 <= record.rounds <= MAX_COUNTED:
        return f"expected rounds of work from 1 to {MAX_COUNTED:,}, found {record.rounds}"
    most = slice_count(view.numel, MAX_SLICES)
    if not 1 <= record.slices <= most:
        return f"expected slices from 1 to {most}, found {record.slices}"[:200]
    return ""


def payload_size(view: RoundView) -> int:
    """Return the bytes of a payload of the round."""
    codec, topk = view.settings.codec, view.settings.topk
    block = block_elements(view.numel)
    return HEADER_BYTES + checked_bytes(view.numel, codec, block=block, topk=topk)


def _outliers(view: RoundView, accepted: Sequence[ContributionRecord]) -> list[Refusal]:
    """Return the refusals of norms far above the others, by the robust z-score ``0.6745 (x -
    median) / MAD``."""
    limit = view.settings.outlier_z
    if limit <= 0 or len(accepted) < FEWEST_FOR_OUTLIERS:
        return []
    median = statistics.median(record.norm for record in accepted)
    spread = statistics.median(abs(record.norm - median) for record in accepted)
    spread = max(spread, LEAST_SPREAD * median)
    scores = {r.replica: 0.6745 * (r.norm - median) / spread for r in accepted if spread > 0}
    return [
        _refusal(
            record,
            f"expected a norm of at most {limit:g} robust deviations above the median "
            f"{median:.4g}, found {record.norm:.4g} ({scores[record.replica]:.1f})",
        )
        for record in accepted
        if scores.get(record.replica, 0.0) > limit
    ]


def _fresh(view: RoundView, accepted: Sequence[ContributionRecord]) -> list[Refusal]:
    """Return the refusals of replicas in quarantine, while enough other replicas have contributed
    or any is still expected.

    If the other replicas are fewer than the quorum (in the first rounds, or after failures),
    replicas in quarantine count too; otherwise no round could be closed.
    """
    rounds = view.settings.quarantine_rounds
    fresh = [r for r in accepted if r.rounds_here < min(rounds, view.round - 1)]
    outstanding = view.expected - view.suspected - {r.replica for r in accepted}
    if not outstanding and len(accepted) - len(fresh) < view.settings.min_quorum:
        return []
    return [
        _refusal(r, f"round {r.rounds_here + 1} of {rounds} after joining", "quarantine")
        for r in fresh
    ]


def _spares(view: RoundView, accepted: Sequence[ContributionRecord]) -> list[Refusal]:
    if view.settings.world_size_mode != "fixed_with_spares":
        return []
    wanted = view.settings.num_replicas
    return [
        _refusal(record, f"the {wanted} places of the round are taken", "spare")
        for record in accepted[wanted:]
    ]


def _refusal(record: ContributionRecord, reason: str, kind: str = "refused") -> Refusal:
    return Refusal(replica=record.replica, incarnation=record.incarnation, reason=reason, kind=kind)


def grace_window_s(view: RoundView, accepted: Sequence[ContributionRecord]) -> float:
    """Return the seconds that the round stays open for live stragglers after the quorum is
    complete.

    ``min(cap, gamma * max(0, tau * step_s - quorum_s - sync_s))``, at least the floor (Decoupled
    DiLoCo, arXiv:2604.21428): the time that overlap leaves until a replica would have to wait. The
    cap if ``grace_gamma`` is 0.
    """
    settings = view.settings
    if settings.grace_gamma <= 0:
        return settings.grace_s
    step_s = statistics.median(record.compute_s / record.steps for record in accepted)
    slack_s = settings.overlap_steps * step_s - view.waited_s - view.sync_s
    window_s = min(settings.grace_s, settings.grace_gamma * max(0.0, slack_s))
    return max(settings.grace_floor_s, window_s)


def make_plan(
    view: RoundView,
    accepted: Sequence[ContributionRecord],
    refused: Sequence[Refusal],
    *,
    wall_s: float,
) -> Plan:
    """Return the plan of a round that closes with the ``accepted`` contributions."""
    settings = view.settings
    late = late_replicas(view, accepted, refused)
    weights = weights_of(accepted, late, settings, before=plan_before(view))
    mode = reduce_mode(view, len(accepted))
    owners: tuple[int, ...] = ()
    if mode == SHARDED:
        owners = tuple(record.replica for record in accepted) * shards_per_owner(
            numel=view.numel,
            codec=settings.codec,
            replicas=len(accepted),
            mean_codec=settings.mean_codec,
        )
    elif mode == SYNCER:
        owners = (min(view.syncers),)
    return Plan(
        round=view.round,
        fragment=view.fragment,
        mode=mode,
        planner=view.me,
        contributions=tuple(
            PlannedContribution(
                replica=record.replica,
                incarnation=record.incarnation,
                weight=weight,
                tokens=record.tokens,
                new_tokens=record.new_tokens,
                steps=record.steps,
                rounds=record.rounds,
                compute_s=record.compute_s,
                loss=record.loss,
                size_bytes=record.size_bytes,
                digest=record.digest,
                norms=record.norms if settings.merge == "rda" else (),
                slices=record.slices,
                attempt=record.attempt,
            )
            for record, weight in zip(accepted, weights, strict=True)
        ),
        owners=owners,
        steady_rounds=steady_rounds(view, accepted, late),
        refused=tuple(refused),
        late=late,
        wall_s=wall_s,
    )


def reduce_mode(view: RoundView, contributors: int) -> str:
    """Return the reduce plan for a round of so many contributors. Without a live syncer, *syncer*
    is replaced by the cheapest plan."""
    wanted = view.settings.reduce_plan
    if contributors == 1:
        return GATHER
    if wanted in (GATHER, SHARDED) or (wanted == SYNCER and view.syncers):
        return wanted
    return cheapest_plan(
        numel=view.numel,
        codec=view.settings.codec,
        topk=view.settings.topk,
        mean_codec=view.settings.mean_codec,
        replicas=contributors,
        syncer=bool(view.syncers),
    )
