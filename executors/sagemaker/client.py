"""AWS clients of one configuration, and the classification of their errors.

Every client uses a :class:`boto3.Session` with the configuration's credentials. Without
credentials, boto3's default chain applies (environment, files, the machine's role). Other endpoints
are set by ``AWS_ENDPOINT_URL`` or ``AWS_ENDPOINT_URL_<SERVICE>``, in the credentials or in the
environment.

Few requests are retried here, because the callers poll and retry launches themselves.
Common errors: docs.aws.amazon.com/sagemaker/latest/APIReference/CommonErrors.html
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ParamValidationError,
)
from botocore.exceptions import ConnectionError as NotConnected
from botocore.loaders import create_loader

from executors.base import (
    AccountError,
    ExecutorError,
    LaunchRefused,
    NoCapacity,
    RetryLater,
)
from executors.launching import retry_after_s
from executors.refusals import quota_refusal

CONNECTIONS = 32
"""Connections per service and region: the number of concurrent launches of a process."""

_SERVICES = {
    "sagemaker": "SAGEMAKER",
    "logs": "CLOUDWATCH_LOGS",
    "sts": "STS",
    "secretsmanager": "SECRETS_MANAGER",
    "service-quotas": "SERVICE_QUOTAS",
}
"""Service -> its name in the SDKs' environment variables."""

_LOADER = create_loader()
"""Shared by all sessions, because parsing the model of a service takes up to a second."""

BUSY = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded")
QUOTA = ("ResourceLimitExceeded", "LimitExceededException", "QuotaExceededException")
_INTERVENTION = (
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "IncompleteSignature",
    "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "OptInRequired",
    "SubscriptionRequiredException",
)
CAPACITY = "CapacityError"
"""Part of a message: no machine of the type was available (docs.aws.amazon.com/sagemaker/latest/dg/
model-managed-spot-training-status.html)."""
_ROLE = "Could not assume role"
"""Part of a ValidationException of CreateTrainingJob; a different request would not help."""


class Clients:
    """Clients by service and region, created on first use. Thread-safe."""

    def __init__(self, credentials: Mapping[str, str], *, answer_s: float) -> None:
        self._credentials = credentials
        self._config = Config(
            connect_timeout=min(5.0, answer_s),
            read_timeout=answer_s,
            retries={"mode": "standard", "total_max_attempts": 3},
            max_pool_connections=CONNECTIONS,
            user_agent_extra="archipelago",
        )
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def default_region(self) -> str:
        """The region of the credentials or the environment; empty without one."""
        with self._lock, aws_errors():
            return str(self._open().region_name or "")

    def instance_types(self) -> list[str]:
        """Instance types that the SDK's model of SageMaker lists."""
        model = self.get("sagemaker", "us-east-1").meta.service_model
        return list(model.shape_for("TrainingInstanceType").enum)

    def get(self, service: str, region: str) -> Any:
        with self._lock:
            if (service, region) not in self._clients:
                with aws_errors():
                    self._clients[service, region] = self._open().client(
                        service,
                        region_name=region,
                        endpoint_url=self._endpoint(service),
                        config=self._config,
                    )
            return self._clients[service, region]

    def _open(self) -> Any:
        if self._session is None:
            given = self._credentials
            core = botocore.session.Session()
            core.register_component("data_loader", _LOADER)
            self._session = boto3.Session(
                botocore_session=core,
                aws_access_key_id=given.get("AWS_ACCESS_KEY_ID") or None,
                aws_secret_access_key=given.get("AWS_SECRET_ACCESS_KEY") or None,
                aws_session_token=given.get("AWS_SESSION_TOKEN") or None,
                region_name=given.get("AWS_DEFAULT_REGION") or given.get("AWS_REGION") or None,
            )
        return self._session

    def _endpoint(self, service: str) -> str | None:
        """The endpoint of the credentials; None lets the SDK read the environment."""
        given = self._credentials
        own = given.get(f"AWS_ENDPOINT_URL_{_SERVICES[service]}")
        return own or given.get("AWS_ENDPOINT_URL") or None


@contextlib.contextmanager
def aws_errors() -> Iterator[None]:
    """Convert errors of boto3, with AWS's message."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise classified(error) from error


def classified(error: ClientError | BotoCoreError) -> ExecutorError:
    """Classify an error of boto3."""
    if not isinstance(error, ClientError):
        message = str(error)
        if isinstance(error, (NotConnected, HTTPClientError, IncompleteReadError)):
            return RetryLater(message)
        if isinstance(error, ParamValidationError):
            return LaunchRefused(message)
        return AccountError(message)  # no credentials, no region, an unknown profile
    code = code_of(error)
    message = f"{code}: {message_of(error)}"
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    after_s = retry_after_s(metadata.get("HTTPHeaders", {}).get("retry-after"))
    if status >= 500 or status == 429 or code in BUSY:
        return RetryLater(message, after_s=after_s)
    if code in QUOTA:
        return quota_refusal(message, after_s=after_s)
    if CAPACITY in message:
        return NoCapacity(message, after_s=after_s)
    if status in (401, 402, 403) or code in _INTERVENTION or code.startswith("AccessDenied"):
        return AccountError(message)
    if _ROLE in message_of(error):
        return AccountError(message)
    return LaunchRefused(message)


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", ""))


def is_unknown(error: ClientError) -> bool:
    """Whether the training job does not exist: documented as ResourceNotFound, in practice a
    ValidationException (github.com/aws/aws-sdk/issues/165)."""
    return code_of(error) in ("ResourceNotFound", "ResourceNotFoundException") or (
        code_of(error) == "ValidationException" and "resource not found" in message_of(error)
    )
