"""AWS clients of one configuration, and what their errors mean to us.

Every client is made from a :class:`boto3.Session` of the configuration's own credentials; where it
has none, boto3 looks where it always does (this process's environment, its files, the machine's
role). An endpoint other than AWS's is named as the SDKs name it, ``AWS_ENDPOINT_URL`` or
``AWS_ENDPOINT_URL_<SERVICE>``, in the credentials or in the environment.

Retries are few: a caller that polls asks again anyway, and a launch is tried again by whoever
asked for it. Common errors: docs.aws.amazon.com/sagemaker/latest/APIReference/CommonErrors.html
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
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
    ExecutorError,
    LaunchRefused,
    NeedsPerson,
    NoCapacity,
    RetryLater,
)
from executors.launching import retry_after_s, scrub
from executors.refusals import quota_refusal

CONNECTIONS = 32
"""Per service and region: as many launches go on at once in one process."""

_SERVICES = {
    "sagemaker": "SAGEMAKER",
    "logs": "CLOUDWATCH_LOGS",
    "sts": "STS",
    "secretsmanager": "SECRETS_MANAGER",
    "service-quotas": "SERVICE_QUOTAS",
}
"""Service -> how the SDKs spell it in a variable."""

_LOADER = create_loader()
"""The services' models, parsed once for all sessions of this process: each takes up to a second."""

BUSY = ("Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded")
QUOTA = ("ResourceLimitExceeded", "LimitExceededException", "QuotaExceededException")
_PERSON = (
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
"""In a message: there was no machine of the type (docs.aws.amazon.com/sagemaker/latest/dg/
model-managed-spot-training-status.html)."""
_ROLE = "Could not assume role"
"""CreateTrainingJob says so as a ValidationException; another request would not help."""


class Clients:
    """Clients by service and region, made when they are first asked for; for many threads."""

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
        self._made: dict[tuple[str, str], Any] = {}
        self._lock = threading.Lock()

    def default_region(self) -> str:
        """The region that is named in the credentials or in the environment, or empty."""
        with self._lock, aws_errors():
            return str(self._open().region_name or "")

    def instance_types(self) -> list[str]:
        """What the SDK knows that SageMaker takes."""
        model = self.get("sagemaker", "us-east-1").meta.service_model
        return list(model.shape_for("TrainingInstanceType").enum)

    def get(self, service: str, region: str) -> Any:
        with self._lock:
            if (service, region) not in self._made:
                with aws_errors():
                    self._made[service, region] = self._open().client(
                        service,
                        region_name=region,
                        endpoint_url=self._endpoint(service),
                        config=self._config,
                    )
            return self._made[service, region]

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
        """None leaves it to the SDK, which reads the same names in the environment."""
        given = self._credentials
        own = given.get(f"AWS_ENDPOINT_URL_{_SERVICES[service]}")
        return own or given.get("AWS_ENDPOINT_URL") or None


@contextlib.contextmanager
def aws_errors(secrets: Iterable[str] = ()) -> Iterator[None]:
    """What boto3 raises, as one of ours, with AWS's own words but for the secrets in them."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        # Not chained where there is something to hide: a traceback would print it.
        hidden = list(secrets)
        raise meaning(error, hidden) from (None if hidden else error)


def meaning(error: ClientError | BotoCoreError, secrets: Iterable[str] = ()) -> ExecutorError:
    """Can waiting help, or a person, or nothing?"""
    if not isinstance(error, ClientError):
        said = scrub(str(error), secrets)
        if isinstance(error, (NotConnected, HTTPClientError, IncompleteReadError)):
            return RetryLater(said)
        if isinstance(error, ParamValidationError):
            return LaunchRefused(said)
        return NeedsPerson(said)  # no credentials, no region, a profile that is not there
    code = code_of(error)
    said = scrub(f"{code}: {message_of(error)}", secrets)
    answer = error.response.get("ResponseMetadata", {})
    status = int(answer.get("HTTPStatusCode", 0))
    after_s = retry_after_s(answer.get("HTTPHeaders", {}).get("retry-after"))
    if status >= 500 or status == 429 or code in BUSY:
        return RetryLater(said, after_s=after_s)
    if code in QUOTA:
        return quota_refusal(said, after_s=after_s)
    if CAPACITY in said:
        return NoCapacity(said, after_s=after_s)
    if status in (401, 402, 403) or code in _PERSON or code.startswith("AccessDenied"):
        return NeedsPerson(said)
    if _ROLE in message_of(error):
        return NeedsPerson(said)
    return LaunchRefused(said)


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", ""))


def is_unknown(error: ClientError) -> bool:
    """Whether AWS knows no such training job: documented as ResourceNotFound, and in fact a
    ValidationException (github.com/aws/aws-sdk/issues/165)."""
    return code_of(error) in ("ResourceNotFound", "ResourceNotFoundException") or (
        code_of(error) == "ValidationException" and "resource not found" in message_of(error)
    )
