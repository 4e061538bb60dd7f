"""The Jobs API of the Hugging Face Hub, with jobs as processes of this machine.

Serves ``/api/jobs`` and ``/api/whoami-v2`` to the real client ``huggingface_hub`` 2.4, which parses
every response. Requires a bearer token. Rules and sources:

- A job without a timeout ends after 30 minutes, with ``ERROR`` and "Job timeout":
  huggingface.co/docs/huggingface_hub/guides/jobs and huggingface.co/docs/hub/jobs-configuration.
- Names and labels are not unique: the guide. Their characters: ``HfApi.update_job_labels``.
- Flavours: huggingface.co/docs/hub/jobs-pricing, and ``GET /api/jobs/hardware``.
- Missing credit is 402, with the message that users report; a namespace without access is 403; an
  unknown one is 404: huggingface.co/docs/hub/jobs-pricing, and the client's
  ``hf_raise_for_status``.
- A rate limit is 429 with ``RateLimit`` headers: huggingface.co/docs/hub/rate-limits. Proxies send
  ``Retry-After`` as seconds or as a date (RFC 9110, section 10.2.3).
- A submission can return 500 although its job was created: reported by users.
- Lists come in pages, by the ``Link`` header, which the client's ``paginate`` follows. With
  :meth:`HuggingFaceHub.hold_lists` they lag; no page promises that they are current.
- Stages: ``huggingface_hub.JobStage``. :meth:`HuggingFaceHub.restage` gives a job a stage that is
  unknown to this version of the client.

Not emulated: images, volumes (checked, not mounted), scheduled jobs, exposed ports, metrics, and
restarts of this process.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, Literal, Self

from tests.emulators.faults import RequestFaults
from tests.emulators.http_server import HttpServer
from tests.emulators.huggingface_http import HubApi, time_text
from tests.emulators.huggingface_spec import (
    DEFAULT_TIMEOUT_S,
    Refused,
    about_machine,
    check,
    hardware,
)
from tests.emulators.processes import Job, Processes

TOKEN = "hf_emulated"
USER = "islands"
ORG = "archipelago"

NO_CREDIT = (
    "Pre-paid credit balance is insufficient - add more credits to your account to use Jobs."
)

SubmitFault = Literal["refused", "started", "hung_up"]
LimitForm = Literal["window", "seconds", "date"]


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The Hub's record of a job, without its process."""

    id: str
    namespace: str
    spec: Mapping[str, Any] = field(repr=False)
    created_wall_s: float

    @property
    def age(self) -> tuple[float, str]:
        return self.created_wall_s, self.id

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.spec.get("labels") or {})


class HuggingFaceHub:
    """The emulated Hub; a context manager. ``root`` holds a folder for each job.

    ``tokens`` maps tokens to users; every user is a member of :data:`ORG`. With ``scheduling`` new
    jobs wait in SCHEDULING until :meth:`schedule`. With ``filters`` False lists ignore all filters.
    """

    def __init__(
        self,
        root: Path,
        *,
        port: int = 0,
        tokens: Mapping[str, str] | None = None,
        page_size: int = 50,
        grace_s: float = 10.0,
    ) -> None:
        self.processes = Processes(root, grace_s=grace_s)
        self.tokens = dict(tokens or {TOKEN: USER})
        self.page_size = page_size
        self.scheduling = False
        self.filters = True
        self.delay_s = 0.0
        self.requests = 0
        self._server = HttpServer(HubApi(self), port=port)
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self.faults = RequestFaults()
        self._quota: tuple[int, str] | None = None
        self._limited: dict[str, str] | None = None
        self._stages: dict[str, str] = {}
        self._listed: list[str] | None = None
        self._submit_faults: list[SubmitFault] = []

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.processes.close()

    # Faults

    def start(self) -> None:
        """Accept connections, at the same address after a :meth:`stop`."""
        self._server.start()

    def stop(self) -> None:
        """Refuse new connections and close open ones. Jobs continue."""
        self._server.stop()

    def preempt(self, job: str) -> None:
        self.processes.kill(self._id(job), "preempted", grace_s=0)

    def oom(self, job: str) -> None:
        self.processes.kill(self._id(job), "oom", grace_s=0)

    def lose(self, job: str) -> None:
        """Delete the record of a job and its process."""
        job = self._id(job)
        with self._lock:
            del self._records[job]
        self.processes.forget(job)

    def refuse_quota(self, message: str | None = NO_CREDIT, status: int = 402) -> None:
        """Refuse new jobs with this message, by default about missing credit; None ends it."""
        self._quota = None if message is None else (status, message)

    def restage(self, job: str, stage: str | None) -> None:
        """Report this stage of a job regardless of its state; None ends it."""
        with self._lock:
            self._stages.pop(self._id_of(job), None)
            if stage is not None:
                self._stages[self._id_of(job)] = stage

    def hold_lists(self, held: bool = True) -> None:
        """Omit jobs created from now on from lists, until this is called with False."""
        with self._lock:
            self._listed = list(self._records) if held else None

    def slow(self, seconds: float) -> None:
        """Delay every response by ``seconds``."""
        self.delay_s = seconds

    def rate_limit(self, seconds: float | None, form: LimitForm = "window") -> None:
        """Answer every request with 429 and this delay, as the Hub's window or as ``Retry-After``;
        None ends it."""
        if seconds is None:
            self._limited = None
        elif form == "window":
            self._limited = {
                "RateLimit": f'"api";r=0;t={round(seconds)}',
                "RateLimit-Policy": '"fixed window";"api";q=1000;w=300',
            }
        else:
            date = formatdate(time.time() + seconds, usegmt=True)
            self._limited = {"Retry-After": date if form == "date" else str(round(seconds))}

    def fail_submit(self, fault: SubmitFault, times: int = 1) -> None:
        """Fail the next submissions: ``refused`` with 500 and no job, ``started`` with 500 and a
        job, or ``hung_up`` with a job and no response."""
        self._submit_faults.extend([fault] * times)

    def schedule(self) -> None:
        """Start the jobs that wait in SCHEDULING."""
        self.scheduling = False
        for job in self.processes.all():
            self.processes.begin(job.id)

    # The API; methods raise Refused

    def user(self, authorization: str) -> str:
        """The user of a token."""
        user = self.tokens.get(authorization.removeprefix("Bearer "))
        if user is None:
            words = "Invalid credentials in Authorization header"
            raise Refused(401, words, {"X-Error-Message": words})
        if self._limited is not None:
            raise Refused(429, "We had to rate limit you", self._limited)
        return user

    def whoami(self, user: str) -> dict[str, Any]:
        return {
            "type": "user",
            "id": _object_id(user),
            "name": user,
            "fullname": user,
            "email": f"{user}@example.invalid",
            "canPay": True,
            "isPro": True,
            "orgs": [
                {
                    "type": "org",
                    "id": _object_id(ORG),
                    "name": ORG,
                    "fullname": ORG,
                    "canPay": True,
                    "plan": "team",
                    "roleInOrg": "write",
                }
            ],
            "auth": {
                "type": "access_token",
                "accessToken": {
                    "displayName": "emulated",
                    "role": "write",
                    "createdAt": "2026-01-01T00:00:00.000Z",
                },
            },
        }

    def hardware(self) -> list[dict[str, Any]]:
        return hardware()

    def run(self, user: str, namespace: str, spec: Mapping[str, Any]) -> dict[str, Any] | None:
        """Start a job. None means: close the connection without a response."""
        self._member(user, namespace)
        if self._quota is not None:
            raise Refused(*self._quota)
        check(spec)
        with self._lock:
            fault = self._submit_faults.pop(0) if self._submit_faults else None
        if fault == "refused":
            raise Refused(500, "Internal Error")
        now = time.time()
        job_id = f"{int(now):08x}{secrets.token_hex(8)}"
        self.processes.start(
            [*spec["command"], *spec.get("arguments", ())],
            {
                "JOB_ID": job_id,
                **about_machine(spec["flavor"]),
                **spec["environment"],
                **spec.get("secrets", {}),
            },
            timeout_s=spec.get("timeoutSeconds", DEFAULT_TIMEOUT_S),
            job_id=job_id,
            held=self.scheduling,
        )
        with self._lock:  # recorded after its start, so that a concurrent list shows a complete job
            self._records[job_id] = _Record(
                id=job_id, namespace=namespace, spec=spec, created_wall_s=now
            )
        if fault == "started":
            raise Refused(500, "Internal Error")
        return None if fault == "hung_up" else self.inspect(user, namespace, job_id)

    def list(
        self, user: str, namespace: str, *, stages: list[str], labels: list[str], after: str
    ) -> tuple[list[dict[str, Any]], str]:
        """A page, newest first, and the cursor of the next page; empty for none."""
        self._member(user, namespace)
        if not self.filters:
            stages, labels = [], []
        selected = dict(label.split("=", 1) for label in labels)
        with self._lock:
            records = [r for r in self._records.values() if r.namespace == namespace]
            if self._listed is not None:
                records = [record for record in records if record.id in self._listed]
            last = self._records.get(after)
        records.sort(key=lambda record: record.age, reverse=True)
        jobs = [
            job
            for record in records
            if selected.items() <= record.labels.items()
            if last is None or record.age < last.age
            if (job := self._job_info(record)) is not None
            and (not stages or job["status"]["stage"] in stages)
        ]
        page = jobs[: self.page_size]
        return page, page[-1]["id"] if len(jobs) > len(page) else ""

    def inspect(self, user: str, namespace: str, job: str) -> dict[str, Any]:
        info = self._job_info(self._record(user, namespace, job))
        if info is None:
            raise Refused(404, "Job not found")
        return info

    def cancel(self, user: str, namespace: str, job: str) -> dict[str, Any]:
        info = self.inspect(user, namespace, job)
        if info["status"]["stage"] not in ("SCHEDULING", "RUNNING"):
            raise Refused(409, "Job is already finished")
        self.processes.kill(job, "cancelled")
        return self.inspect(user, namespace, job)

    def check_logs(self, user: str, namespace: str, job: str) -> None:
        self._record(user, namespace, job)

    def _member(self, user: str, namespace: str) -> None:
        if namespace not in (user, ORG):
            if namespace.startswith("no-such"):
                raise Refused(404, f"Namespace {namespace!r} not found")
            raise Refused(403, f"You don't have the rights to use Jobs under {namespace!r}")

    def _record(self, user: str, namespace: str, job: str) -> _Record:
        self._member(user, namespace)
        with self._lock:
            record = self._records.get(job)
        if record is None or record.namespace != namespace:
            raise Refused(404, "Job not found")
        return record

    def _id(self, job: str) -> str:
        """The id of a job, from its id or its name."""
        with self._lock:
            return self._id_of(job)

    def _id_of(self, job: str) -> str:
        named = [r.id for r in self._records.values() if job in (r.id, r.labels.get("name"))]
        if not named:
            raise KeyError(f"expected a job's id or name, found {job!r}")
        return named[-1]

    def _job_info(self, record: _Record) -> dict[str, Any] | None:
        """The job in the API's format; None if it was deleted concurrently."""
        try:
            job = self.processes.get(record.id)
        except KeyError:
            return None
        stage, message = _stage(job)
        stage = self._stages.get(record.id, stage)
        spec = record.spec
        until = job.ended_wall_s or time.time()
        return {
            "id": record.id,
            "createdAt": time_text(record.created_wall_s),
            "startedAt": time_text(job.started_wall_s),
            "finishedAt": time_text(job.ended_wall_s),
            "dockerImage": spec.get("dockerImage"),
            "spaceId": spec.get("spaceId"),
            "command": spec["command"],
            "arguments": spec.get("arguments", []),
            "environment": spec["environment"],
            "secrets": sorted(spec.get("secrets", {})),
            "flavor": spec["flavor"],
            "labels": record.labels,
            "volumes": spec.get("volumes"),
            "status": {"stage": stage, "message": message},
            "durations": {
                "schedulingSecs": round((job.started_wall_s or until) - record.created_wall_s),
                "runningSecs": round(until - job.started_wall_s) if job.started_wall_s else None,
                "totalSecs": round(until - record.created_wall_s),
            },
            "owner": {
                "id": _object_id(record.namespace),
                "name": record.namespace,
                "type": "org" if record.namespace == ORG else "user",
            },
            "initiator": None,
        }


def _stage(job: Job) -> tuple[str, str | None]:
    if job.state == "pending":
        return "SCHEDULING", None
    if job.state == "running":
        return "RUNNING", None
    if job.ended_by == "cancelled":
        return "CANCELED", None
    if job.ended_by == "deadline":
        return "ERROR", "Job timeout"
    if job.exit_code == 0:
        return "COMPLETED", None
    reason = {"oom": "OOMKilled", "preempted": "Evicted"}.get(job.ended_by, "Error")
    return "ERROR", f"Job failed with exit code: {job.exit_code}. Reason: {reason}"


def _object_id(name: str) -> str:
    return name.encode().hex()[:24].ljust(24, "0")
