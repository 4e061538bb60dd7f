"""Who is in a round: screening contributions, weights, the grace window, and the plan itself.

Pure, like all of the decision core; :mod:`diloco.protocol.round_decision` says when it is asked.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from diloco.protocol.blocks import HEADER_BYTES, block_count
from diloco.protocol.payload_size import payload_bytes
from diloco.protocol.records import ContributionRecord, Plan, PlannedContribution, Refusal
from diloco.protocol.reduce_cost import cheapest_plan
from diloco.protocol.round_view import GATHER, SHARDED, SYNCER, RoundView

FEWEST_FOR_OUTLIERS = 4
"""A median of fewer norms says little about what is normal."""
NORM_TOLERANCE = 1e-6
"""Between a contribution's norm and that of its tensors' norms, by rounding."""
MOST_COUNTED = 10**15
"""Tokens, steps or seconds that one contribution may claim; weights of it are exact in fp64."""
LEAST_SPREAD = 0.05
"""Spread of the norms that is never called an outlier, as a share of their median."""


def screen(view: RoundView) -> tuple[list[ContributionRecord], list[Refusal]]:
    """Sort contributions into those that may be averaged, by replica, and those that may not.

    A contribution without tokens is neither: it counts for nothing.
    """
    accepted: list[ContributionRecord] = []
    refused: list[Refusal] = []
    agreed = _agreed_digest(view)
    for replica in sorted(view.contributions):
        record = view.contributions[replica]
        reason = _wrong(view, record, agreed)
        if replica == view.shunned:
            reason = "its payloads could not be read in the last two rounds, which are void"
        if reason:
            refused.append(_refusal(record, reason))
        elif record.tokens > 0 and record.steps > 0:
            accepted.append(record)
    for reject in (_outliers, _fresh, _spares):
        bad = reject(view, accepted)
        refused += bad
        out = {refusal.replica for refusal in bad}
        accepted = [record for record in accepted if record.replica not in out]
    return accepted, sorted(refused, key=lambda refusal: refusal.replica)


def _agreed_digest(view: RoundView) -> str:
    """Of the base weights: the majority's are right; in a draw the observer trusts its own."""
    digests = Counter(
        c.base_digest for c in view.contributions.values() if c.base_round == view.base_round
    )
    return max(digests, key=lambda d: (digests[d], d == view.base_digest), default="")


def _wrong(view: RoundView, record: ContributionRecord, agreed_digest: str) -> str:
    for what, expected, found in (
        ("model", view.model_hash, record.model_hash),
        ("round", view.round, record.round),
        ("fragment", view.fragment, record.fragment),
        ("codec", view.settings.codec, record.codec),
        ("number of elements", view.numel, record.numel),
        ("base round", view.base_round, record.base_round),
        ("digest of the base weights", agreed_digest, record.base_digest),
    ):
        if expected != found:
            return f"expected {what} {expected}, found {found}"
    blocks, size_bytes = block_count(view.numel), payload_size(view)
    for what, count, length in (
        ("norms", view.tensors, len(record.norms)),
        ("digits of checksums", 8 * blocks, len(record.checksums)),
        ("bytes", size_bytes, record.size_bytes),
    ):
        if count != length:
            return f"expected {count} {what}, found {length}"
    if not all(map(math.isfinite, (record.norm, record.loss, *record.norms))):
        return f"expected a finite pseudo-gradient, found norm {record.norm} and loss {record.loss}"
    together = math.hypot(*record.norms)
    if min(record.norms) < 0 or not math.isclose(record.norm, together, rel_tol=NORM_TOLERANCE):
        return (
            f"expected a norm of {together:.6g}, that of the tensors together, found {record.norm}"
        )
    claims: tuple[tuple[str, float], ...] = (
        ("tokens", record.tokens),
        ("new tokens", record.new_tokens),
        ("steps", record.steps),
        ("compute seconds", record.compute_s),
    )
    for what, claimed in claims:
        if not 0 <= claimed <= MOST_COUNTED:
            return f"expected {what} from 0 to {MOST_COUNTED:,}, found {claimed}"[:200]
    return ""


def payload_size(view: RoundView) -> int:
    """Bytes of a payload of the round."""
    codec, topk = view.settings.codec, view.settings.topk
    return HEADER_BYTES + payload_bytes(view.numel, codec, topk=topk)


def _outliers(view: RoundView, accepted: Sequence[ContributionRecord]) -> list[Refusal]:
    """Norms far above the others', by the robust z-score ``0.6745 (x - median) / MAD``."""
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
    """Replicas in quarantine, as long as enough seasoned ones are there or any is on the way.

    Where the seasoned ones are fewer than the quorum (the first rounds, or some have died and come
    back) the fresh ones count too: otherwise no round would ever be closed again.
    """
    rounds = view.settings.quarantine_rounds
    fresh = [r for r in accepted if r.rounds_here < min(rounds, view.round - 1)]
    coming = view.expected - {r.replica for r in accepted}
    if not coming and len(accepted) - len(fresh) < view.settings.min_quorum:
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


def weight_of(record: ContributionRecord, weighting: str) -> float:
    """The weight of a contribution, before they are normalised to sum to one.

    ``tokens``: tokens * tokens / steps (Decoupled DiLoCo, arXiv:2604.21428).
    """
    if weighting == "tokens":
        return record.tokens * record.tokens / record.steps
    return 1.0


def grace_window_s(view: RoundView, accepted: Sequence[ContributionRecord]) -> float:
    """How long the round stays open for live stragglers once the quorum is there.

    ``min(cap, gamma * max(0, tau * step_s - quorum_s - sync_s))``, never below the floor (Decoupled
    DiLoCo): what overlap leaves of the time before anybody would have to wait. The whole cap where
    ``grace_gamma`` is 0.
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
    """The plan of a round that is to be closed with the ``accepted``."""
    settings = view.settings
    weights = [weight_of(record, settings.weighting) for record in accepted]
    mode = reduce_mode(view, len(accepted))
    owners: tuple[int, ...] = ()
    if mode == SHARDED:
        owners = tuple(record.replica for record in accepted)
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
                weight=weight / sum(weights),
                tokens=record.tokens,
                new_tokens=record.new_tokens,
                steps=record.steps,
                compute_s=record.compute_s,
                loss=record.loss,
                size_bytes=record.size_bytes,
                digest=record.digest,
                checksums=record.checksums,
                norms=record.norms if settings.merge == "rda" else (),
            )
            for record, weight in zip(accepted, weights, strict=True)
        ),
        owners=owners,
        refused=tuple(refused),
        wall_s=wall_s,
    )


def reduce_mode(view: RoundView, contributors: int) -> str:
    """The reduce plan for a round of so many; a syncer that is not there cannot be used."""
    wanted = view.settings.reduce_plan
    if contributors == 1:
        return GATHER
    if wanted in (GATHER, SHARDED) or (wanted == SYNCER and view.syncers):
        return wanted
    return cheapest_plan(
        numel=view.numel,
        codec=view.settings.codec,
        topk=view.settings.topk,
        replicas=contributors,
        syncer=bool(view.syncers),
    )
