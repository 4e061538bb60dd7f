"""Keys for one attempt of one replica: they open its run's prefix, nothing else, and expire.

AssumeRole with a session policy: what the keys may is what both the role and the policy allow, so
one role with access to the whole bucket serves all runs. A missing object must be told from a
forbidden one (404, not 403), and S3 does that only to who may list: it evaluates ListBucket with
the key as ``s3:prefix``, which the policy's condition allows within the prefix. The prefix in that
condition ends at a slash: a listing of ``runs/1`` would show ``runs/10`` as well.

Left out: renewal. A replica is handed over to its next attempt before its keys expire.

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
from executors.base import NeedsPerson, RetryLater
from runs.credentials.kinds import ROLE_ARN

SHORTEST_S = 900
"""The least STS gives, and ours for an attempt that ends earlier."""
LONGEST_S = 3600
"""What a role allows unless it is told otherwise."""

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
    """Variables for a replica, and for how long they are good."""

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
    """Keys of the role in a credential's ``options`` that open ``uri``, for an attempt of
    ``lifetime_s``. ``environment`` is the credential's; None asks as the server itself.

    Raises :class:`NeedsPerson` with STS's words, or :class:`RetryLater`.
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
    answer = _ask(request, environment, str(options.get("sts_endpoint_url") or ""))
    given = answer["Credentials"]
    kept = {n: v for n, v in (environment or {}).items() if n not in _KEYS.values()}
    keys = {variable: str(given[name]) for name, variable in _KEYS.items()}
    return Session(
        environment={**kept, **keys},
        lifetime_s=_lifetime_s(answer, otherwise=request["DurationSeconds"]),
    )


def duration_s(lifetime_s: float | None, longest_s: int | None) -> int:
    """How long to ask for: the attempt's life, within what STS and the role allow."""
    longest = longest_s or LONGEST_S
    wanted = longest if lifetime_s is None else int(lifetime_s)
    return min(max(wanted, SHORTEST_S), longest)


def session_policy(uri: str, *, partition: str = "aws", kms_key_arn: str = "") -> dict[str, Any]:
    """What a replica may do in ``s3://bucket/prefix``: everything a run does there, nothing else.

    The prefix ends at a slash, so that ``runs/1`` does not open ``runs/10``. Raises
    :class:`NeedsPerson` for a URI that is not in canonical form.
    """
    try:
        location = canonical(uri, resolve=False)
    except BadLocation as error:
        raise NeedsPerson(str(error)) from None
    if location.scheme != "s3":
        raise NeedsPerson(f"expected s3://bucket/prefix, found {uri}")
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
    """As a pattern that means itself: ``*``, ``?`` and ``$`` are signs in a policy."""
    return "".join(f"${{{c}}}" if c in "*?$" else c for c in prefix)


def _ask(
    request: Mapping[str, Any], environment: Mapping[str, str] | None, endpoint_url: str
) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

    try:
        answer: dict[str, Any] = _client(environment, endpoint_url).assume_role(**request)
    except ClientError as error:
        said, status = error.response["Error"], error.response["ResponseMetadata"]["HTTPStatusCode"]
        message = f"AssumeRole {request['RoleArn']}: {said['Code']}: {said['Message']}"
        if status >= 500 or said["Code"] in _BUSY:
            raise RetryLater(message) from None
        raise NeedsPerson(message) from None
    except (HTTPClientError, ConnectionError) as error:
        raise RetryLater(f"AssumeRole {request['RoleArn']}: {error}") from None
    except (BotoCoreError, ValueError) as error:
        raise NeedsPerson(f"AssumeRole {request['RoleArn']}: {error}") from None
    return answer


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
        # Other servers than Amazon's answer at one address.
        endpoint_url=endpoint_url or access.endpoint_url,
        config=Config(**config, ignore_configured_endpoint_urls=True),
    )


def _lifetime_s(answer: Mapping[str, Any], *, otherwise: int) -> float:
    """By the clock of the server that says when they expire."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    asked = email.utils.parsedate_to_datetime(date) if date else None
    if asked is None:
        return float(otherwise)
    return float((answer["Credentials"]["Expiration"] - asked).total_seconds())
