"""Secrets Manager and Service Quotas of an emulated account, for SageMaker's jobs.

Each method takes a request's parameters and returns the response, or raises
:class:`~tests.emulators.aws.AwsError`. Rules and sources
(docs.aws.amazon.com/secretsmanager/latest/ apireference/):

- A name is used by one secret at a time: API_CreateSecret.html, ResourceExistsException.
- A deletion without recovery is asynchronous. Until it is complete no secret of that name can be
  created, written or read (InvalidRequestException), and lists leave it out:
  API_DeleteSecret.html, ForceDeleteWithoutRecovery. ``hold_deletions`` keeps it incomplete.
- Forced deletion of an unknown secret is no error: the same page.
- A secret has at most 65,536 bytes: API_CreateSecret.html, SecretString (checked by the model).
"""

from __future__ import annotations

import secrets as random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.emulators.aws import AwsError

QUOTA = 20.0


class Secrets:
    """Secrets by region and name, in ``kept``."""

    def __init__(self, account: str) -> None:
        self.account = account
        self.kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._deleted: set[tuple[str, str]] = set()
        self._deletions_held = False

    def hold_deletions(self, held: bool = True) -> None:
        """Keep deletions incomplete until this is called with False."""
        with self._lock:
            self._deletions_held = held
            if not held:
                self._deleted.clear()

    def create(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        name = given["Name"]
        ending = random.token_hex(3)
        arn = f"arn:aws:secretsmanager:{region}:{self.account}:secret:{name}-{ending}"
        with self._lock:
            if (region, name) in self._deleted:
                raise AwsError(
                    "InvalidRequestException",
                    "You can't create this secret because a secret with this name is already "
                    "scheduled for deletion.",
                )
            if (region, name) in self.kept:
                raise AwsError(
                    "ResourceExistsException",
                    f"The operation failed because the secret {name} already exists.",
                )
            self.kept[region, name] = {
                "ARN": arn,
                "Name": name,
                "CreatedDate": time.time(),
                "SecretString": given["SecretString"],
                "Tags": given.get("Tags", []),
            }
        return {"ARN": arn, "Name": name}

    def put(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            secret = self._find(region, given["SecretId"])
            secret["SecretString"] = given["SecretString"]
            return {"ARN": secret["ARN"], "Name": secret["Name"]}

    def get(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            secret = self._find(region, given["SecretId"])
            return {name: value for name, value in secret.items() if name != "Tags"}

    def delete(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Delete a secret at once. The response for an unknown secret is the same."""
        if not given.get("ForceDeleteWithoutRecovery"):
            raise AwsError("InvalidParameterException", "This emulator deletes by force only.")
        name = (region, given["SecretId"])
        with self._lock:
            if self.kept.pop(name, None) is not None and self._deletions_held:
                self._deleted.add(name)
        return {"Name": given["SecretId"]}

    def list(self, region: str, given: Mapping[str, Any]) -> dict[str, Any]:
        [prefix] = given["Filters"][0]["Values"]
        with self._lock:
            result = [
                {key: value for key, value in secret.items() if key != "SecretString"}
                for (where, name), secret in self.kept.items()
                if where == region and name.startswith(prefix)
            ]
        return {"SecretList": result}

    def _find(self, region: str, name: str) -> dict[str, Any]:
        if (region, name) in self._deleted:
            raise AwsError(
                "InvalidRequestException",
                "You can't perform this operation on the secret because it was marked for "
                "deletion.",
            )
        for (where, _), secret in self.kept.items():
            if where == region and name in (secret["Name"], secret["ARN"]):
                return secret
        raise AwsError(
            "ResourceNotFoundException", "Secrets Manager can't find the specified secret."
        )


class Quotas:
    """Limits of training instances per type; ``limits`` overrides :data:`QUOTA` by name."""

    def __init__(self, instance_types: Sequence[str]) -> None:
        self.limits: dict[str, float] = {}
        self._names = [
            f"{kind} for {spot}training job usage"
            for kind in instance_types
            for spot in ("", "spot ")
        ]

    def limit(self, name: str) -> float:
        return self.limits.get(name, QUOTA)

    def list(self, given: Mapping[str, Any]) -> dict[str, Any]:
        first, size = int(given.get("NextToken", 0)), given.get("MaxResults", 100)
        page = self._names[first : first + size]
        more = {"NextToken": str(first + size)} if first + size < len(self._names) else {}
        return {
            "Quotas": [{"QuotaName": name, "Value": self.limit(name)} for name in page],
            **more,
        }
