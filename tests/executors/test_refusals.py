"""Refusals are classified by their message: in use, zero, or unclear."""

from __future__ import annotations

import pytest

from executors.base import AccountError, NoCapacity, RetryLater
from executors.refusals import (
    UNCLEAR_ATTEMPTS,
    is_capacity_message,
    quota_refusal,
)


def sagemaker(limit: int, used: int, delta: int = 1) -> str:
    return (
        "ResourceLimitExceeded: The account-level service limit 'ml.g5.xlarge for training job "
        f"usage' is {limit} Instances, with current utilization of {used} Instances and a request "
        f"delta of {delta} Instances. Please use AWS Service Quotas to request an increase."
    )


@pytest.mark.parametrize(
    "message",
    [
        sagemaker(2, 2),
        sagemaker(2, 3),  # utilization above the limit was reported by users
        sagemaker(8, 6, 4),
        "the limit of concurrent Sandboxes is reached",
        "not enough hardware capacity",
        "all GPUs are currently in use",
        "You have reached the concurrent jobs limit of your plan",
        "The service is temporarily unavailable",
    ],
)
def test_a_quota_in_use_is_retried_without_limit(message: str) -> None:
    error = quota_refusal(message, after_s=3.0)
    assert type(error) is NoCapacity
    assert (error.after_s, error.attempts) == (3.0, None)


@pytest.mark.parametrize(
    "message",
    [
        sagemaker(0, 0),
        sagemaker(2, 0, 4),  # one replica is larger than the quota
        "The account-level service limit for training-job/ml.p2.xlarge is 0 Instances, with "
        "current utilization of 0 Instances and a request delta of 2 Instances.",
        "The account-level service limit 'Longest run time for a training job' is 432000 Seconds, "
        "with current utilization of 0 Seconds and a request delta of 500000 Seconds.",
        "Function call failed: workspace billing cycle spend limit reached",
        "Pre-paid credit balance is insufficient - add more credits to your account to use Jobs.",
        "Upgrade your plan to use H100",
        "your quota is 0 for this GPU",
        "the concurrency limit is 0",
        "Spend limit reached: try again after the billing cycle",
    ],
)
def test_a_zero_quota_or_a_payment_requires_intervention(message: str) -> None:
    assert type(quota_refusal(message)) is AccountError
    assert not is_capacity_message(message)


def test_an_unclear_refusal_is_retried_a_bounded_number_of_times() -> None:
    error = quota_refusal("Limit exceeded (code 7)")
    assert isinstance(error, NoCapacity)
    assert error.attempts == UNCLEAR_ATTEMPTS


def test_a_rate_limit_is_not_lack_of_capacity() -> None:
    for message in ("Rate limit exceeded", "Too many requests"):
        assert type(quota_refusal(message)) is RetryLater
