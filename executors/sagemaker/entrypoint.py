"""Fetch the replica's secrets in the container, then execute the replica's command.

Every user who can describe a training job can read its Environment, so it holds only the ARN of a
secret in AWS Secrets Manager. This program reads the secret with the job's execution role into the
environment of the command that follows. It is packed into the job's command line
(:func:`executors.sagemaker.secrets.with_secrets`), so it imports only the standard library.

An error is printed and written to the file that SageMaker shows as ``FailureReason``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENT = "boto3>=1.40,<2"
"""Installed if the image has no boto3; AWS's deep learning images have it."""


def client(arn: str) -> Any:
    try:
        import boto3
    except ImportError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", REQUIREMENT]
        subprocess.run(pip, check=True)
        import boto3
    from botocore.config import Config

    own = os.environ.get("AWS_ENDPOINT_URL_SECRETS_MANAGER")
    # AWS_ENDPOINT_URL can be the endpoint of a bucket outside AWS.
    config = Config(ignore_configured_endpoint_urls=True, retries={"total_max_attempts": 8})
    region = arn.split(":")[3]
    return boto3.client("secretsmanager", region_name=region, endpoint_url=own, config=config)


def main() -> None:
    arn = os.environ.pop("ARCHIPELAGO_SECRET_ARN")
    try:
        answer = client(arn).get_secret_value(SecretId=arn)
    except Exception as error:
        message = f"the replica's secrets could not be fetched: {type(error).__name__}: {error}"
        try:
            Path("/opt/ml/output/failure").write_text(message)
        except OSError:
            print("no /opt/ml/output here", file=sys.stderr)
        sys.exit(message)
    os.environ.update(json.loads(answer["SecretString"]))
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606


if __name__ == "__main__":
    main()
