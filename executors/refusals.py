"""Classify a refused request: retry later, or require intervention.

A backend that is full frees capacity by itself; an account whose limit is zero, or smaller than
one replica, never does. Services report both with one error code, so the message decides. A
message that matches neither is retried :data:`UNCLEAR_ATTEMPTS` times in a row, and then requires
intervention.

Message formats:

- SageMaker, ``ResourceLimitExceeded``: "The account-level service limit 'ml.g5.xlarge for training
  job usage' is 2 Instances, with current utilization of 2 Instances and a request delta of 1
  Instances" (github.com/aws/amazon-sagemaker-examples/issues/1543; an older form names the limit
  without quotes, github.com/aws/sagemaker-python-sdk/issues/35).
- Modal, ``RESOURCE_EXHAUSTED``: "workspace billing cycle spend limit reached"
  (github.com/modal-labs/modal-client/issues/3397).
- Hugging Face: "Pre-paid credit balance is insufficient", "not enough hardware capacity".
"""

from __future__ import annotations

import re

from executors.base import AccountError, ExecutorError, NoCapacity, RetryLater

UNCLEAR_ATTEMPTS = 6
"""Launches in a row that a pool attempts while the refusal's cause is unclear."""

_USAGE = re.compile(
    r"\bis (?P<limit>\d+(?:\.\d+)?) (?P<unit>\w+), with current utilization of "
    r"(?P<used>\d+(?:\.\d+)?) \w+ and a request delta of (?P<delta>\d+(?:\.\d+)?)"
)
_RATE = re.compile(r"rate.?limit|too many requests", re.IGNORECASE)
_ZERO = re.compile(r"(limit|quota)( of| is|:) (0|zero)\b(?!\.)", re.IGNORECASE)
_IN_USE = re.compile(
    r"capacity|concurren|too many|rate.?limit|(already|currently) running|\bin use\b",
    re.IGNORECASE,
)
_ACCOUNT = re.compile(
    r"\b(billing|spend(ing)?|payment|pay|credits?|balance|budget|invoice|subscri\w+|upgrade|"
    r"plan|pro|not (allowed|permitted|enabled|entitled))\b",
    re.IGNORECASE,
)
_TEMPORARY = re.compile(r"try again|temporar|unavailable|overloaded|\bbusy\b", re.IGNORECASE)


def quota_refusal(message: str, *, after_s: float | None = None) -> ExecutorError:
    """The error for a request that was refused by a quota, a limit or for lack of payment."""
    usage = _USAGE.search(message)
    if usage is not None:
        if float(usage["limit"]) < float(usage["delta"]):
            return AccountError(message)
        return NoCapacity(message, after_s=after_s)
    if _RATE.search(message):
        return RetryLater(message, after_s=after_s)
    if is_capacity_message(message):
        return NoCapacity(message, after_s=after_s)
    if _ZERO.search(message) or _ACCOUNT.search(message):
        return AccountError(message)
    return NoCapacity(message, after_s=after_s, attempts=UNCLEAR_ATTEMPTS)


def is_capacity_message(message: str) -> bool:
    """Whether a refusal reports a full backend, and not an account that lacks something."""
    if _ZERO.search(message):
        return False
    if _IN_USE.search(message):
        return True
    return _TEMPORARY.search(message) is not None and _ACCOUNT.search(message) is None
