"""A replica's secrets on SageMaker: one secret in AWS Secrets Manager per attempt.

DescribeTrainingJob shows all of a job's ``Environment``, so secrets cannot be there. A job with
secrets gets the ARN of a Secrets Manager secret, and a step before its command that reads the
secret with the execution role (:mod:`executors.sagemaker.entrypoint`). A job without secrets gets
neither, and its account needs no permission for Secrets Manager. The secret is deleted when a poll
sees the job's end; :func:`sweep` deletes secrets that a crashed control plane left.

API: docs.aws.amazon.com/secretsmanager/latest/apireference/ (CreateSecret, PutSecretValue,
DeleteSecret with ForceDeleteWithoutRecovery, ListSecrets).
"""

from __future__ import annotations

import ast
import base64
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from botocore.exceptions import ClientError

from executors.base import LaunchRefused, RetryLater
from executors.sagemaker import entrypoint
from executors.sagemaker.client import aws_errors, code_of, message_of
from executors.sagemaker.request import MAX_CHARS, name_prefix

ARN_VARIABLE = "ARCHIPELAGO_SECRET_ARN"
FOLDER = "archipelago/"
MAX_BYTES = 65_536
"""Limit of one secret, which holds all variables of a replica."""

STALE_S = 3600.0
"""A secret this old without a running job is stale: a launch takes seconds."""

_LOADER = (
    "import sys,zlib,base64;n=int(sys.argv[1])+2;"
    "step=zlib.decompress(base64.b64decode(''.join(sys.argv[2:n])));"
    "del sys.argv[1:n];exec(step)"
)


def secret_name(job_name: str) -> str:
    return f"{FOLDER}{job_name}"


def put(
    client: Any,
    job_name: str,
    secrets: Mapping[str, str],
    *,
    tags: Mapping[str, str],
    kms_key_id: str = "",
) -> str:
    """Store a replica's secrets, replacing those of an earlier try. Returns the ARN."""
    text = json.dumps(dict(secrets))
    if len(text.encode()) > MAX_BYTES:
        raise LaunchRefused(
            f"secrets: expected at most {MAX_BYTES} bytes for one replica, "
            f"found {len(text.encode())} ({', '.join(secrets)})"
        )
    name = secret_name(job_name)
    key = {"KmsKeyId": kms_key_id} if kms_key_id else {}
    listed = [{"Key": label, "Value": value} for label, value in tags.items()]
    with aws_errors():
        try:
            made = client.create_secret(Name=name, SecretString=text, Tags=listed, **key)
        except ClientError as error:
            if code_of(error) != "ResourceExistsException":
                _wait_for_deletion(error, name)
            try:
                made = client.put_secret_value(SecretId=name, SecretString=text)
            except ClientError as gone:  # deleted between the two requests
                if code_of(gone) == "ResourceNotFoundException":
                    raise RetryLater(f"{name}: {message_of(gone)}") from None
                _wait_for_deletion(gone, name)
    return str(made["ARN"])


def _wait_for_deletion(error: ClientError, name: str) -> NoReturn:
    """Raise RetryLater for a secret that is being deleted, which blocks its name
    (API_DeleteSecret); otherwise raise ``error``."""
    if code_of(error) == "InvalidRequestException" and "deletion" in message_of(error):
        raise RetryLater(f"{name}: {message_of(error)}") from None
    raise error


def delete(client: Any, job_name: str) -> None:
    """Delete a secret at once. AWS accepts the deletion of an unknown secret."""
    with aws_errors():
        client.delete_secret(SecretId=secret_name(job_name), ForceDeleteWithoutRecovery=True)


def sweep(
    client: Any,
    deployment: str,
    *,
    has_ended: Callable[[str], bool],
    older_than_s: float = STALE_S,
    clock: Callable[[], float] = time.time,
) -> None:
    """Delete the deployment's old secrets whose job has ended or never existed.

    Args:
        has_ended: called with the name of a job.
    """
    prefix = secret_name(name_prefix(deployment))
    with aws_errors():
        pages = client.get_paginator("list_secrets").paginate(
            Filters=[{"Key": "name", "Values": [prefix]}]
        )
        listed = [secret for page in pages for secret in page["SecretList"]]
    for secret in listed:
        name = str(secret["Name"])
        age_s = clock() - secret["CreatedDate"].timestamp()
        if name.startswith(prefix) and age_s > older_than_s:
            job_name = name.removeprefix(FOLDER)
            if has_ended(job_name):
                delete(client, job_name)


def with_secrets(command: Sequence[str], *, python: str) -> list[str]:
    """``command`` preceded by the step that fetches the secrets, in arguments of legal length."""
    packed = base64.b64encode(zlib.compress(_step().encode(), 9)).decode()
    parts = [packed[n : n + MAX_CHARS] for n in range(0, len(packed), MAX_CHARS)]
    return [python, "-c", _LOADER, str(len(parts)), *parts, *command]


def _step() -> str:
    """The step's source without its comments and docstrings."""
    tree = ast.parse(Path(entrypoint.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)):
            node.body[:] = [part for part in node.body if not _is_text(part)]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
