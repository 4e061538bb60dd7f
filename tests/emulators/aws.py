"""The common part of AWS's JSON services: signatures, errors, and validated parameters.

Signatures are Signature Version 4, recomputed from the request
(docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html); parameters are
checked against the service's model, which botocore ships. Not emulated: expired dates, query
strings and paths other than ``/``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<date>\d{8})/(?P<region>[^/]+)/"
    r"(?P<service>[^/]+)/aws4_request, SignedHeaders=(?P<signed>[^,]+), "
    r"Signature=(?P<signature>[0-9a-f]{64})"
)


class AwsError(Exception):
    """An error response: AWS's code and message."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Identity:
    """An identity with access. A role's credentials are temporary and have a session token."""

    secret_key: str = field(repr=False)
    arn: str
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The authenticated sender of a request, and its region."""

    identity: Identity
    access_key: str
    region: str


def authenticate(
    headers: Mapping[str, str], body: bytes, identities: Mapping[str, Identity]
) -> Caller:
    """Verify a signature. Header names are in lower case. Raises :class:`AwsError`."""
    given = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if given is None:
        raise AwsError("MissingAuthenticationTokenException", "Missing Authentication Token")
    identity = identities.get(given["key"])
    if identity is None or identity.session_token != headers.get("x-amz-security-token", ""):
        raise AwsError(
            "UnrecognizedClientException", "The security token included in the request is invalid."
        )
    if not hmac.compare_digest(_signature(given, headers, body, identity), given["signature"]):
        raise AwsError(
            "InvalidSignatureException",
            "The request signature we calculated does not match the signature you provided. Check "
            "your AWS Secret Access Key and signing method. Consult the service documentation for "
            "details.",
        )
    return Caller(identity=identity, access_key=given["key"], region=given["region"])


def _signature(
    given: re.Match[str], headers: Mapping[str, str], body: bytes, identity: Identity
) -> str:
    signed = given["signed"].split(";")
    request = "\n".join(
        (
            *("POST", "/", ""),
            *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in signed),
            *("", given["signed"], hashlib.sha256(body).hexdigest()),
        )
    )
    scope = f"{given['date']}/{given['region']}/{given['service']}/aws4_request"
    to_sign = "\n".join(
        (
            *("AWS4-HMAC-SHA256", headers.get("x-amz-date", ""), scope),
            hashlib.sha256(request.encode()).hexdigest(),
        )
    )
    key = f"AWS4{identity.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


def check(shape: Any, value: Mapping[str, Any]) -> None:
    """Validate parameters against a model's input shape. The error lists every violation."""
    wrong = list(_wrong(shape, value, ""))
    if wrong:
        count = f"{len(wrong)} validation error{'s' if len(wrong) > 1 else ''} detected"
        raise AwsError("ValidationException", f"{count}: {'; '.join(wrong)}")


def _wrong(shape: Any, value: Any, path: str) -> Iterator[str]:
    kind, limits = shape.type_name, shape.metadata
    if kind == "structure":
        for name, member in shape.members.items():
            below = f"{path}.{_camel(name)}" if path else _camel(name)
            if value.get(name) is not None:
                yield from _wrong(member, value[name], below)
            elif name in shape.required_members:
                yield _violation("null", below, "Member must not be null")
        return
    if kind in ("timestamp", "double", "float", "boolean"):
        return
    size = value if kind in ("integer", "long") else len(value)
    for limit, sign in (("min", "greater"), ("max", "less")):
        bound = limits.get(limit)
        if bound is not None and (size < bound if limit == "min" else size > bound):
            what = "value" if kind in ("integer", "long") else "length"
            must = f"Member must have {what} {sign} than or equal to {bound}"
            yield _violation(value, path, must)
    if kind == "string":
        if shape.enum and value not in shape.enum:
            listed = ", ".join(shape.enum)
            yield _violation(value, path, f"Member must satisfy enum value set: [{listed}]")
        pattern = limits.get("pattern")
        if pattern and not re.fullmatch(_python(pattern), value):
            must = f"Member must satisfy regular expression pattern: {pattern}"
            yield _violation(value, path, must)
    elif kind == "list":
        for number, item in enumerate(value, 1):
            yield from _wrong(shape.member, item, f"{path}.{number}.member")
    elif kind == "map":
        for name, item in value.items():
            yield from _wrong(shape.key, name, f"{path}.key")
            yield from _wrong(shape.value, item, f"{path}.{name}.member")


def check_answer(shape: Any, answer: Mapping[str, Any]) -> None:
    """Validate a response of an emulator against the service's model. A violation is a defect of
    the emulator, reported as an error that no client retries."""
    wrong = [] if shape is None else [*_wrong(shape, answer, ""), *_unknown(shape, answer, "")]
    if wrong:
        raise AwsError("EmulatorDefect", f"answer against {shape.name}: {'; '.join(wrong)}")


def _unknown(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Members of a response that its model lacks."""
    if shape.type_name == "structure":
        for name, below in value.items():
            where = f"{path}.{name}"
            if name not in shape.members:
                yield f"{where} is not in the model"
            else:
                yield from _unknown(shape.members[name], below, where)
    elif shape.type_name == "list":
        for number, item in enumerate(value):
            yield from _unknown(shape.member, item, f"{path}[{number}]")


def _violation(value: object, path: str, must: str) -> str:
    return f"Value '{value}' at '{path}' failed to satisfy constraint: {must}"


def _camel(name: str) -> str:
    return name[0].lower() + name[1:]


def _python(pattern: str) -> str:
    """Convert a pattern of the models from Java's syntax."""
    return pattern.replace(r"\p{L}\p{Z}\p{N}_", r"\w\s")
