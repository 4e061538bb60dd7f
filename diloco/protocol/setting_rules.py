"""Rules between group settings, checked after each value's own bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.protocol.payload_size import FULL_MEAN
from diloco.protocol.setting_spec import SettingsError, plain

if TYPE_CHECKING:
    from diloco.protocol.settings import GroupSettings


def check_rounds(settings: GroupSettings) -> None:
    """Check the lengths of rounds, overlap, warm-up and outer schedule.

    Raises :class:`SettingsError`.
    """
    if settings.sync_every % settings.num_fragments:
        raise SettingsError(
            "num_fragments",
            f"expected a divisor of the {settings.sync_every} local steps, so that all rounds "
            f"have the same length, found {settings.num_fragments}",
        )
    if settings.overlap_steps >= settings.sync_every:
        raise SettingsError(
            "overlap_steps",
            f"expected less than the {settings.sync_every} local steps: a fragment's exchange "
            f"must end before its next one begins, found {settings.overlap_steps}",
        )
    if settings.warmup_steps > settings.total_steps:
        raise SettingsError(
            "warmup_steps",
            f"expected at most the {settings.total_steps} inner steps of the whole run "
            f"(rounds x H / P), found {settings.warmup_steps}",
        )
    if settings.outer_warmup_rounds > settings.total_rounds:
        raise SettingsError(
            "outer_warmup_rounds",
            f"expected at most the {settings.total_rounds} rounds of the run, "
            f"found {settings.outer_warmup_rounds}",
        )
    if settings.outer_min_lr_ratio and settings.outer_schedule == "constant":
        raise SettingsError(
            "outer_min_lr_ratio",
            "expected 0 with the outer schedule constant, which stays at the peak, "
            f"found {plain(settings.outer_min_lr_ratio)}",
        )
    if settings.dylu == "on" and settings.overlap_steps >= settings.round_steps:
        raise SettingsError(
            "overlap_steps",
            f"expected less than the {settings.round_steps} steps of a round, because dynamic "
            f"local updates shorten rounds, found {settings.overlap_steps}",
        )


def check_exchange(settings: GroupSettings) -> None:
    """Check that the codec of the mean has an effect. Raises :class:`SettingsError`."""
    if settings.mean_codec != FULL_MEAN and settings.reduce_plan == "gather":
        raise SettingsError(
            "mean_codec",
            f"expected {FULL_MEAN}, because the reduce plan gather stores no mean, or another "
            f"reduce plan, found {settings.mean_codec}",
        )


def check_membership(settings: GroupSettings) -> None:
    """Check quorum, grace window and timeouts. Raises :class:`SettingsError`."""
    if settings.min_quorum > settings.num_replicas:
        raise SettingsError(
            "min_quorum",
            f"expected at most the target of {settings.num_replicas} replicas, "
            f"found {settings.min_quorum}",
        )
    if settings.start_replicas > settings.num_replicas:
        raise SettingsError(
            "start_replicas",
            f"expected at most the target of {settings.num_replicas} replicas, "
            f"found {settings.start_replicas}",
        )
    if settings.max_replicas < settings.num_replicas:
        raise SettingsError(
            "max_replicas",
            f"expected at least the target of {settings.num_replicas} replicas, "
            f"found {settings.max_replicas}",
        )
    if (
        settings.world_size_mode == "fixed_with_spares"
        and settings.min_quorum != settings.num_replicas
    ):
        raise SettingsError(
            "min_quorum",
            f"expected the target of {settings.num_replicas} replicas, because the world size "
            f"is fixed, found {settings.min_quorum}",
        )
    if settings.grace_gamma > 0 and not settings.overlap_steps:
        raise SettingsError(
            "grace_gamma",
            "expected 0 without overlap, because the adaptive window is the time that overlap "
            f"leaves, found {plain(settings.grace_gamma)}",
        )
    if settings.grace_floor_s > settings.grace_s and settings.grace_gamma > 0:
        raise SettingsError(
            "grace_floor_s",
            f"expected at most the grace window of {plain(settings.grace_s)} s, "
            f"found {plain(settings.grace_floor_s)}",
        )
    if settings.round_timeout_s <= settings.heartbeat_timeout_s:
        raise SettingsError(
            "round_timeout_s",
            f"expected more than the heartbeat timeout of {plain(settings.heartbeat_timeout_s)} "
            f"s, found {plain(settings.round_timeout_s)}",
        )
    if settings.round_timeout_s < settings.grace_s:
        raise SettingsError(
            "round_timeout_s",
            f"expected at least the grace window of {plain(settings.grace_s)} s, "
            f"found {plain(settings.round_timeout_s)}",
        )
