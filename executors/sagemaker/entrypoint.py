"""Runs in the container, in front of the replica's command: fetches the replica's secrets.

A training job's Environment can be read by everybody who may describe the job, so secrets are not
there: only the name of a secret in AWS Secrets Manager, which this reads with the job's execution
role into the environment of the command that follows. It is packed into the job's command line
(:func:`executors.sagemaker.secrets.with_secrets`) and imports nothing of ours.

What goes wrong is printed, and written where SageMaker looks for a reason (``FailureReason``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENT = "boto3>=1.40,<2"
"""Installed where the image has none; AWS's deep learning images have it."""


def client(arn: str) -> Any:
    try:
        import boto3
    except ImportError:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", REQUIREMENT]
        subprocess.run(pip, check=True)
        import boto3
    from botocore.config import Config

    own = os.environ.get("AWS_ENDPOINT_URL_SECRETS_MANAGER")
    # AWS_ENDPOINT_URL may lead to a bucket elsewhere.
    config = Config(ignore_configured_endpoint_urls=True, retries={"total_max_attempts": 8})
    region = arn.split(":")[3]
    return boto3.client("secretsmanager", region_name=region, endpoint_url=own, config=config)


def main() -> None:
    arn = os.environ.pop("ARCHIPELAGO_SECRET_ARN")
    try:
        answer = client(arn).get_secret_value(SecretId=arn)
    except Exception as error:
        said = f"the replica's secrets could not be fetched: {type(error).__name__}: {error}"
        try:
            Path("/opt/ml/output/failure").write_text(said)
        except OSError:
            print("no /opt/ml/output here", file=sys.stderr)
        sys.exit(said)
    os.environ.update(json.loads(answer["SecretString"]))
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606


if __name__ == "__main__":
    main()
