"""Amazon SageMaker on one machine, with training jobs as processes, and the services it uses.

One server on one port serves the parts that replicas need: SageMaker training jobs, their
CloudWatch Logs, Secrets Manager, Service Quotas, and GetCallerIdentity of STS. Set
``AWS_ENDPOINT_URL`` (or ``AWS_ENDPOINT_URL_SAGEMAKER`` and so on) to its address; requests are
signed with :data:`ACCESS_KEY` and :data:`SECRET_KEY` (:mod:`tests.emulators.aws`). A job gets
credentials of its execution role from an endpoint, as on SageMaker; the role can only read secrets.

``POST /_emulator/<fault>`` with the fault's arguments as JSON calls that method of
:class:`SageMakerServer`: see :data:`FAULTS`; ``job`` is a job's name or its launch key.

Not emulated: images, instances and their prices, S3, and restarts of this process.
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

from botocore.loaders import Loader
from botocore.model import ServiceModel

from tests import botocore_models
from tests.emulators.aws import AwsError, Caller, Identity, authenticate, check, check_answer
from tests.emulators.faults import HangUp, RequestFaults
from tests.emulators.http_server import Exchange, HttpServer, inject
from tests.emulators.processes import Processes
from tests.emulators.sagemaker_account import Quotas, Secrets
from tests.emulators.sagemaker_jobs import TrainingJob, TrainingJobs

botocore_models.share()

ACCOUNT = "123456789012"
ACCESS_KEY, SECRET_KEY = "AKIAEMULATED", "emulated-secret-key"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/archipelago-replica"

FAULTS = (
    *("preempt", "oom", "lose", "refuse_quota", "slow"),
    *("throttle", "withhold_machines", "give_machines", "starve", "break_down"),
    *("limit", "hold_stopping", "hold_lists", "hold_deletions"),
)
_TARGETS = {
    "SageMaker": "sagemaker",
    "Logs_20140328": "logs",
    "secretsmanager": "secretsmanager",
    "ServiceQuotasV20190624": "service-quotas",
}


class SageMakerServer:
    """An account. ``folder`` holds a folder per start of a job; port 0 selects a free port."""

    def __init__(self, folder: Path, *, port: int = 0, grace_s: float = 120.0) -> None:
        self._lock = threading.Lock()
        self.processes = Processes(folder, grace_s=grace_s)
        self.identities = {
            ACCESS_KEY: Identity(secret_key=SECRET_KEY, arn=f"arn:aws:iam::{ACCOUNT}:user/control")
        }
        self.quotas = Quotas(_model("sagemaker").shape_for("TrainingInstanceType").enum)
        self.jobs = TrainingJobs(
            self.processes,
            account=ACCOUNT,
            environment=self._machine,
            limit=self.quotas.limit,
        )
        self.secrets = Secrets(ACCOUNT)
        self.denied: set[str] = set()
        self.requests = 0
        self.seen: list[str] = []
        self._quota: str | None = None
        self._slow_s = 0.0
        self._throttled = 0
        self.faults = RequestFaults()
        self._http = HttpServer(self._serve, port=port)

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def client_env(self) -> dict[str, str]:
        """The environment of an SDK that uses this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.processes.close()

    # Faults

    def start(self) -> None:
        self._http.start()

    def stop(self) -> None:
        """Refuse new connections and close open ones. Jobs continue."""
        self._http.stop()

    def preempt(self, job: str) -> None:
        """Interrupt a spot job; it waits for a machine until :meth:`give_machines`."""
        self.jobs.interrupt(self.jobs.named(job))

    def oom(self, job: str) -> None:
        self.jobs.kill_for_memory(self.jobs.named(job))

    def lose(self, job: str) -> None:
        """Delete a job and its record; its name stays in use."""
        self.jobs.forget(self.jobs.named(job))

    def break_down(self, job: str) -> None:
        """Break the machine of a job, which SageMaker reports as an internal error."""
        self.jobs.break_down(self.jobs.named(job))

    def refuse_quota(self, message: str | None) -> None:
        """Refuse new jobs with this quota message; None ends it."""
        self._quota = message

    def slow(self, seconds: float) -> None:
        """Delay every response by ``seconds``."""
        self._slow_s = seconds

    def throttle(self, count: int = 1) -> None:
        """Throttle the next ``count`` requests."""
        self._throttled = count

    def withhold_machines(self) -> None:
        """Make new jobs wait until :meth:`give_machines`, which also restarts interrupted ones."""
        self.jobs.capacity = False

    def give_machines(self) -> None:
        self.jobs.give_machines()

    def starve(self, job: str) -> None:
        """Fail a waiting job for lack of capacity."""
        self.jobs.starve(self.jobs.named(job))

    def limit(self, quota: str, instances: float) -> None:
        """Set a quota of the account, by its name in Service Quotas."""
        self.quotas.limits[quota] = instances

    def hold_stopping(self, held: bool = True) -> None:
        """Keep stopped jobs in Stopping until this is called with False."""
        self.jobs.stopping_held = held

    def hold_lists(self, held: bool = True) -> None:
        """Freeze lists until this is called with False."""
        self.jobs.hold_lists(held)

    def hold_deletions(self, held: bool = True) -> None:
        """Keep the names of deleted secrets blocked until this is called with False."""
        self.secrets.hold_deletions(held)

    # Responses

    def _serve(self, exchange: Exchange) -> None:
        headers = {name.lower(): value for name, value in exchange.headers.items()}
        if exchange.fault is not None:
            status, kind, body = self._fault(exchange.fault, exchange.body)
        else:
            status, kind, body = self._answer(exchange.path, headers, exchange.body)
        exchange.answer(status, body, kind)

    def _answer(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        if path.startswith("/_role/"):
            return _json(200, self._role(path.removeprefix("/_role/")))
        with self._lock:
            self.requests += 1
        time.sleep(self._slow_s)
        operation = headers.get("x-amz-target", "sts").rpartition(".")[2]
        fault = self.faults.of(operation)
        if fault == "drop_before":
            raise HangUp
        if fault == "unavailable":
            return _json(503, {"__type": "ServiceUnavailable", "message": "Service Unavailable"})
        answer = self._answered(headers, body)
        if fault == "drop_after":
            raise HangUp
        return answer

    def _answered(self, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        target = headers.get("x-amz-target", "")
        with self._lock:
            throttled, self._throttled = self._throttled, max(0, self._throttled - 1)
        try:
            if throttled:
                raise AwsError("ThrottlingException", "Rate exceeded")
            caller = authenticate(headers, body, self.identities)
            if not target:
                return self._sts(caller, body)
            return _json(200, self._call(caller, target, json.loads(body or b"{}")))
        except AwsError as error:
            if not target:
                return _sts_error(error)
            response = {"__type": error.code, "message": error.args[0], "Message": error.args[0]}
            return _json(error.status, response)

    def _call(self, caller: Caller, target: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        prefix, _, operation = target.partition(".")
        service = _TARGETS.get(prefix, "")
        action = f"{service}:{operation}"
        self.seen.append(action)
        call = self._operations(caller).get(action)
        if call is None:
            raise AwsError("UnknownOperationException", f"Unknown operation {target}")
        # A role can only read its secret.
        of_role = bool(caller.identity.session_token)
        if action in self.denied or of_role != (action == "secretsmanager:GetSecretValue"):
            raise AwsError(
                "AccessDeniedException",
                f"User: {caller.identity.arn} is not authorized to perform: {action} because no "
                f"identity-based policy allows the {action} action",
            )
        model = _model(service).operation_model(operation)
        check(model.input_shape, given)
        answer = call(given)
        check_answer(model.output_shape, answer)
        return answer

    def _operations(
        self, caller: Caller
    ) -> dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        region, jobs, kept = caller.region, self.jobs, self.secrets
        return {
            "sagemaker:CreateTrainingJob": lambda given: self._create(region, given),
            "sagemaker:DescribeTrainingJob": lambda given: jobs.describe(region, given),
            "sagemaker:ListTrainingJobs": lambda given: jobs.list(region, given),
            "sagemaker:StopTrainingJob": lambda given: jobs.stop(region, given),
            "sagemaker:ListTags": lambda given: jobs.tags(region, given),
            "logs:DescribeLogStreams": lambda given: jobs.log_streams(region, given),
            "logs:GetLogEvents": lambda given: jobs.log_events(region, given),
            "secretsmanager:CreateSecret": lambda given: kept.create(region, given),
            "secretsmanager:PutSecretValue": lambda given: kept.put(region, given),
            "secretsmanager:GetSecretValue": lambda given: kept.get(region, given),
            "secretsmanager:DeleteSecret": lambda given: kept.delete(region, given),
            "secretsmanager:ListSecrets": lambda given: kept.list(region, given),
            "service-quotas:ListServiceQuotas": self.quotas.list,
        }

    def _create(self, region: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._quota is not None:
            raise AwsError("ResourceLimitExceeded", self._quota)
        return self.jobs.create(region, given)

    def _sts(self, caller: Caller, body: bytes) -> tuple[int, str, bytes]:
        action = parse_qs(body.decode())["Action"][0]
        self.seen.append(f"sts:{action}")
        if action != "GetCallerIdentity":
            raise AwsError("InvalidAction", f"Could not find operation {action}", status=400)
        return 200, "text/xml", _STS.format(arn=caller.identity.arn, account=ACCOUNT).encode()

    def _machine(self, job: TrainingJob) -> dict[str, str]:
        """Environment variables that SageMaker's machines set for a job."""
        return {
            "AWS_REGION": job.region,
            "TRAINING_JOB_NAME": job.name,
            "TRAINING_JOB_ARN": job.arn,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.url}/_role/{job.name}",
            "AWS_ENDPOINT_URL_SECRETS_MANAGER": self.url,
        }

    def _role(self, job_name: str) -> dict[str, str]:
        """Credentials of the execution role, valid for an hour."""
        key, identity = (
            f"ASIA{secrets.token_hex(6).upper()}",
            Identity(
                secret_key=secrets.token_hex(16),
                session_token=secrets.token_hex(16),
                arn=f"arn:aws:sts::{ACCOUNT}:assumed-role/archipelago-replica/{job_name}",
            ),
        )
        with self._lock:
            self.identities[key] = identity
        until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
        return {
            "AccessKeyId": key,
            "SecretAccessKey": identity.secret_key,
            "Token": identity.session_token,
            "Expiration": until,
        }

    def _fault(self, name: str, body: bytes) -> tuple[int, str, bytes]:
        try:
            inject(self, FAULTS, name, json.loads(body or b"{}"))
        except ValueError as error:
            return _json(400, {"error": str(error)})
        return _json(200, {})


@functools.cache
def _model(service: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


_STS = (
    '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
    "<GetCallerIdentityResult><Arn>{arn}</Arn><UserId>EMULATED</UserId>"
    "<Account>{account}</Account></GetCallerIdentityResult></GetCallerIdentityResponse>"
)
_STS_CODES = {
    "UnrecognizedClientException": "InvalidClientTokenId",
    "InvalidSignatureException": "SignatureDoesNotMatch",
    "MissingAuthenticationTokenException": "MissingAuthenticationToken",
}


def _sts_error(error: AwsError) -> tuple[int, str, bytes]:
    code = _STS_CODES.get(error.code, error.code)
    text = (
        '<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Error>'
        f"<Type>Sender</Type><Code>{code}</Code><Message>{error.args[0]}</Message>"
        "</Error></ErrorResponse>"
    )
    return 403 if error.code in _STS_CODES else error.status, "text/xml", text.encode()


def _json(status: int, answer: Mapping[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/x-amz-json-1.1", json.dumps(answer).encode()
