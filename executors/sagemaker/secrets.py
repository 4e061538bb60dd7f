"""A replica's secrets on SageMaker: one secret in AWS Secrets Manager for each attempt.

SageMaker has no environment that is secret: DescribeTrainingJob shows all of ``Environment``. So a
job that needs secrets gets the name of a secret and a step in front of its command that reads it by
the execution role (:mod:`executors.sagemaker.entrypoint`); a job that needs none gets neither, and
its account needs no permission for Secrets Manager. The secret is deleted when the job is seen to
have ended; :func:`sweep` finds what a control plane that died has left.

Relies on docs.aws.amazon.com/secretsmanager/latest/apireference/ (CreateSecret, PutSecretValue,
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
"""Of one secret, all of a replica's variables together."""

LEFT_BEHIND_S = 3600.0
"""A secret this old whose job does not run is nobody's: a launch takes seconds."""

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
    """Store a replica's secrets; the ARN. A launch that is tried again brings newer ones."""
    text = json.dumps(dict(secrets))
    if len(text.encode()) > MAX_BYTES:
        raise LaunchRefused(
            f"secrets: expected at most {MAX_BYTES} bytes for one replica, "
            f"found {len(text.encode())} ({', '.join(secrets)})"
        )
    name = secret_name(job_name)
    key = {"KmsKeyId": kms_key_id} if kms_key_id else {}
    listed = [{"Key": label, "Value": value} for label, value in tags.items()]
    with aws_errors(secrets.values()):
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
    """A secret that is being deleted blocks its name for a while (API_DeleteSecret)."""
    if code_of(error) == "InvalidRequestException" and "deletion" in message_of(error):
        raise RetryLater(f"{name}: {message_of(error)}") from None
    raise error


def delete(client: Any, job_name: str) -> None:
    """For good, at once. One that is not there is no error to AWS either."""
    with aws_errors():
        client.delete_secret(SecretId=secret_name(job_name), ForceDeleteWithoutRecovery=True)


def sweep(
    client: Any,
    deployment: str,
    *,
    is_over: Callable[[str], bool],
    older_than_s: float = LEFT_BEHIND_S,
    clock: Callable[[], float] = time.time,
) -> None:
    """Delete our old secrets of jobs that are over, or never were, by ``is_over(job name)``."""
    prefix = secret_name(name_prefix(deployment))
    with aws_errors():
        pages = client.get_paginator("list_secrets").paginate(
            Filters=[{"Key": "name", "Values": [prefix]}]
        )
        found = [secret for page in pages for secret in page["SecretList"]]
    for secret in found:
        name = str(secret["Name"])
        age_s = clock() - secret["CreatedDate"].timestamp()
        if name.startswith(prefix) and age_s > older_than_s:
            job_name = name.removeprefix(FOLDER)
            if is_over(job_name):
                delete(client, job_name)


def with_secrets(command: Sequence[str], *, python: str) -> list[str]:
    """``command`` behind the step that fetches the secrets, in parts SageMaker takes."""
    packed = base64.b64encode(zlib.compress(_step().encode(), 9)).decode()
    parts = [packed[n : n + MAX_CHARS] for n in range(0, len(packed), MAX_CHARS)]
    return [python, "-c", _LOADER, str(len(parts)), *parts, *command]


def _step() -> str:
    """The step's source without its comments and docstrings."""
    tree = ast.parse(Path(entrypoint.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)):
            said = [part for part in node.body if not _is_text(part)]
            node.body[:] = said
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
