"""Temporary AWS keys for one attempt of one replica, limited to the prefix of its run.

AssumeRole with a session policy: the keys can do what both the role and the policy allow, so one
role with access to the whole bucket serves all runs. A replica must distinguish a missing object
(404) from a forbidden one (403). S3 returns 404 only to callers that can list: it evaluates
ListBucket with the key as ``s3:prefix``, which the condition of the policy allows below the prefix.
The prefix in that condition ends with a slash, because listing ``runs/1`` would also list
``runs/10``.

Keys are not renewed: the control plane replaces an attempt before its keys expire.

https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html,
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
"""

from __future__ import annotations

import email.utils
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.store.credentials import s3_access
from diloco.store.location import BadLocation, canonical
from executors.base import AccountError, RetryLater
from runs.credentials.kinds import ROLE_ARN

SHORTEST_S = 900
"""Minimum of STS, also used for shorter attempts."""
LONGEST_S = 3600
"""Default maximum session duration of a role."""

_OBJECTS = (
    "s3:GetObject",
    "s3:PutObject",
    "s3:DeleteObject",
    "s3:AbortMultipartUpload",
    "s3:ListMultipartUploadParts",
)
_BUSY = frozenset({"Throttling", "ThrottlingException", "RequestLimitExceeded", "SlowDown"})


@dataclass(frozen=True, kw_only=True)
class Session:
    """Environment variables with temporary keys, and their lifetime."""

    environment: Mapping[str, str] = field(repr=False)
    lifetime_s: float

    @property
    def secrets(self) -> list[str]:
        return [self.environment[name] for name in _KEYS.values()]


_KEYS = {
    "AccessKeyId": "AWS_ACCESS_KEY_ID",
    "SecretAccessKey": "AWS_SECRET_ACCESS_KEY",
    "SessionToken": "AWS_SESSION_TOKEN",
}


def assume_role(
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None,
    *,
    uri: str,
    name: str,
    lifetime_s: float | None,
) -> Session:
    """Get temporary keys for ``uri``.

    Args:
        options: options of the credential, with the role.
        environment: variables of the credential; None calls STS with the server's own identity.
        uri: rendezvous of the run, in canonical form.
        name: name of the session.
        lifetime_s: longest duration of the attempt; None if unlimited.

    Raises :class:`AccountError` with the message of STS, or :class:`RetryLater`.
    """
    role = str(options[ROLE_ARN])
    request: dict[str, Any] = {
        "RoleArn": role,
        "RoleSessionName": name,
        "DurationSeconds": duration_s(lifetime_s, options.get("max_session_s")),
        "Policy": json.dumps(
            session_policy(
                uri,
                partition=role.split(":")[1] if role.count(":") > 1 else "aws",
                kms_key_arn=str(options.get("kms_key_arn") or ""),
            ),
            separators=(",", ":"),
        ),
    }
    if options.get("external_id"):
        request["ExternalId"] = str(options["external_id"])
    response = _call_sts(request, environment, str(options.get("sts_endpoint_url") or ""))
    issued = response["Credentials"]
    others = {n: v for n, v in (environment or {}).items() if n not in _KEYS.values()}
    keys = {variable: str(issued[name]) for name, variable in _KEYS.items()}
    return Session(
        environment={**others, **keys},
        lifetime_s=_lifetime_s(response, default=request["DurationSeconds"]),
    )


def duration_s(lifetime_s: float | None, longest_s: int | None) -> int:
    """Session duration to request: that of the attempt, within the limits of STS and the role."""
    longest = longest_s or LONGEST_S
    wanted = longest if lifetime_s is None else int(lifetime_s)
    return min(max(wanted, SHORTEST_S), longest)


def session_policy(uri: str, *, partition: str = "aws", kms_key_arn: str = "") -> dict[str, Any]:
    """IAM policy for ``s3://bucket/prefix`` that allows exactly the operations of a run.

    Raises :class:`AccountError` for a URI that is not in canonical form.
    """
    try:
        location = canonical(uri, resolve=False)
    except BadLocation as error:
        raise AccountError(str(error)) from None
    if location.scheme != "s3":
        raise AccountError(f"expected s3://bucket/prefix, found {uri}")
    bucket = f"arn:{partition}:s3:::{location.bucket}"
    prefix = _literal(location.path)
    listing: dict[str, Any] = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": bucket}
    if prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": f"{prefix}/*"}}
    objects = f"{bucket}/{prefix}/*" if prefix else f"{bucket}/*"
    statements = [listing, {"Effect": "Allow", "Action": list(_OBJECTS), "Resource": objects}]
    if kms_key_arn:
        actions = ["kms:Decrypt", "kms:GenerateDataKey"]
        statements.append({"Effect": "Allow", "Action": actions, "Resource": kms_key_arn})
    return {"Version": "2012-10-17", "Statement": statements}


def _literal(prefix: str) -> str:
    """Escape ``*``, ``?`` and ``$``, which have a meaning in a policy."""
    return "".join(f"${{{c}}}" if c in "*?$" else c for c in prefix)


def _call_sts(
    request: Mapping[str, Any], environment: Mapping[str, str] | None, endpoint_url: str
) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

    try:
        response: dict[str, Any] = _client(environment, endpoint_url).assume_role(**request)
    except ClientError as error:
        details = error.response["Error"]
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        message = f"AssumeRole {request['RoleArn']}: {details['Code']}: {details['Message']}"
        if status >= 500 or details["Code"] in _BUSY:
            raise RetryLater(message) from None
        raise AccountError(message) from None
    except (HTTPClientError, ConnectionError) as error:
        raise RetryLater(f"AssumeRole {request['RoleArn']}: {error}") from None
    except (BotoCoreError, ValueError) as error:
        raise AccountError(f"AssumeRole {request['RoleArn']}: {error}") from None
    return response


def _client(environment: Mapping[str, str] | None, endpoint_url: str) -> Any:
    import boto3
    from botocore.config import Config

    config: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": 20,
        "retries": {"mode": "standard", "total_max_attempts": 3},
    }
    if environment is None:
        client = boto3.session.Session().client
        return client("sts", endpoint_url=endpoint_url or None, config=Config(**config))
    access = s3_access(environment)
    return boto3.session.Session().client(
        "sts",
        aws_access_key_id=access.key_id,
        aws_secret_access_key=access.secret,
        aws_session_token=access.token,
        region_name=access.region,
        # Other servers than Amazon's have one endpoint for S3 and STS.
        endpoint_url=endpoint_url or access.endpoint_url,
        config=Config(**config, ignore_configured_endpoint_urls=True),
    )


def _lifetime_s(response: Mapping[str, Any], *, default: int) -> float:
    """Lifetime of the keys, by the clock of the STS server."""
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    issued_at = email.utils.parsedate_to_datetime(date) if date else None
    if issued_at is None:
        return float(default)
    return float((response["Credentials"]["Expiration"] - issued_at).total_seconds())
