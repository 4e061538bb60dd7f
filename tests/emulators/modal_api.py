"""The part of Modal's API that Sandboxes need, with Sandboxes as processes of this machine.

Two kinds of Sandbox, as in the SDK: those with a GPU (V1: an id of 22 letters and digits, found by
name only while they live) and the others (V2: any other id, also found by name after their end).
``SandboxListV2`` lists both. A name belongs to one live Sandbox of an App. Errors have Modal's gRPC
status. Requests and responses are messages of Modal's own protobuf schema (``modal_proto``). Rules
and sources (modal.com/docs/...):

- A name belongs to one running Sandbox of an App and is free after its end:
  guide/sandboxes#named-sandboxes.
- A Sandbox lives at most 24 hours, 5 minutes by default: guide/sandboxes#timeouts.
- GPU types, and at most 8 of one: guide/gpu.
- Tags: reference/modal.Sandbox#set_tags. A workspace's limits (Sandboxes at once, GPUs, spending)
  are ``RESOURCE_EXHAUSTED``: guide/scale and github.com/modal-labs/modal-client/issues/3397.
- A Sandbox that waits for a machine has no task, and so no log yet.

Images are accepted and never built: jobs run on this interpreter. Left out:
functions, ``exec``, tunnels, snapshots, the contents of volumes.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import secrets
import string
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpclib import GRPCError, Status
from modal_proto import api_pb2 as api

from tests.emulators.modal_log_api import ModalLogApi
from tests.emulators.processes import Job, Processes

GRACE_S = 2.0
LONGEST_S = 24 * 3600
GPUS = (
    *("T4", "L4", "A10", "A10G", "A100", "A100-40GB", "A100-80GB", "L40S"),
    *("H100", "H100!", "H200", "B200", "B200+", "B300", "RTX-PRO-6000", "ANY"),
)
MOST_GPUS = 8
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,63}")
PAGE = 10
"""Sandboxes on one page of a listing."""

_ENDED = {
    "deadline": api.GenericResult.GENERIC_STATUS_TIMEOUT,
    "cancelled": api.GenericResult.GENERIC_STATUS_TERMINATED,
    "preempted": api.GenericResult.GENERIC_STATUS_INTERNAL_FAILURE,
    "oom": api.GenericResult.GENERIC_STATUS_KERNEL_OOM_KILL,
}


@dataclass
class Sandbox:
    """One Sandbox. ``job`` is the id of its process."""

    id: str
    app_id: str
    definition: api.Sandbox
    created_wall_s: float
    job: str
    tags: dict[str, str] = field(default_factory=dict)
    stopped_from_outside: bool = False
    """Ended by a preemption that Modal reports like a termination."""

    @property
    def v1(self) -> bool:
        return len(self.id) == len("sb-") + 22

    @property
    def task_id(self) -> str:
        return self.id.replace("sb-", "ta-", 1)


class ModalApi(ModalLogApi):
    """The API: one method per call, of the same name. Plain methods return the response;
    asynchronous generators stream it."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.lock = threading.RLock()
        self.tokens: dict[str, str] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.images: dict[bytes, str] = {}
        self.requests = 0
        self.quota: str | None = None
        self.starved = False
        self.build_error = ""
        self.building = False
        self.lists_ended = True
        self.named_secrets: dict[str, dict[str, str]] = {}
        self._secrets: dict[str, dict[str, str]] = {}
        self.apps: dict[tuple[str, str], str] = {}
        self.limit: int | None = None
        self._jwt = ".".join(("e30", _base64({"exp": time.time() + 86400}), secrets.token_hex(8)))
        self._clock = itertools.count(1)

    def authorise(self, name: str, metadata: Any) -> None:
        """Check the token. Raises Modal's error for an unknown one."""
        secret = self.tokens.get(metadata.get("x-modal-token-id", ""))
        if secret is None or secret != metadata.get("x-modal-token-secret"):
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        if name.endswith("V2") and metadata.get("x-modal-auth-token") != self._jwt:
            raise GRPCError(Status.UNAUTHENTICATED, "Auth token is missing or not valid")

    # Identity

    def ClientHello(self, request: Empty) -> Message:
        return api.ClientHelloResponse()

    def AuthTokenGet(self, request: Message) -> Message:
        return api.AuthTokenGetResponse(token=self._jwt)

    def WorkspaceNameLookup(self, request: Message) -> Message:
        return api.WorkspaceNameLookupResponse(username="emulated", workspace_name="emulated")

    def EnvironmentGetOrCreate(self, request: Any) -> Message:
        name = request.deployment_name or "main"
        if name.startswith("no-such"):
            raise GRPCError(Status.NOT_FOUND, f"Environment '{name}' not found")
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        return api.EnvironmentGetOrCreateResponse(
            environment_id=f"en-{name}",
            metadata=api.EnvironmentMetadata(name=name, settings=settings),
        )

    # Parts of a Sandbox

    def AppGetOrCreate(self, request: Any) -> Message:
        key = (request.environment_name, request.app_name)
        with self.lock:
            if key not in self.apps:
                if request.object_creation_type != api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                    raise GRPCError(Status.NOT_FOUND, f"App '{request.app_name}' not found")
                self.apps[key] = f"ap-{_letters(22)}"
        return api.AppGetOrCreateResponse(
            app_id=self.apps[key],
            handle_metadata=api.AppHandleMetadata(app_id=self.apps[key]),
        )

    def ImageGetOrCreate(self, request: Any) -> Message:
        wanted = request.image.SerializeToString(deterministic=True)
        image_id = self.images.setdefault(wanted, f"im-{_letters(22)}")
        if self.build_error:
            return api.ImageGetOrCreateResponse(
                image_id=image_id,
                result=api.GenericResult(
                    status=api.GenericResult.GENERIC_STATUS_FAILURE, exception=self.build_error
                ),
            )
        done = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        return api.ImageGetOrCreateResponse(
            image_id=image_id, result=None if self.building else done
        )

    async def ImageJoinStreaming(self, request: Any) -> AsyncIterator[Message]:
        while self.building:
            await asyncio.sleep(0.02)
        yield api.ImageJoinStreamingResponse(
            result=api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS), eof=True
        )

    def MountGetOrCreate(self, request: Any) -> Message:
        return api.MountGetOrCreateResponse(mount_id=f"mo-{_letters(22)}")

    def VolumeGetOrCreate(self, request: Any) -> Message:
        return api.VolumeGetOrCreateResponse(
            volume_id=f"vo-{request.deployment_name}",
            metadata=api.VolumeMetadata(name=request.deployment_name),
        )

    def SecretGetOrCreate(self, request: Any) -> Message:
        secret_id, name = f"st-{_letters(22)}", request.deployment_name
        values = self.named_secrets.get(name) if name else dict(request.env_dict)
        if values is None:
            raise GRPCError(Status.NOT_FOUND, f"Secret '{name}' not found")
        self._secrets[secret_id] = values
        return api.SecretGetOrCreateResponse(
            secret_id=secret_id, metadata=api.SecretMetadata(name=name, keys=sorted(values))
        )

    # Sandboxes

    def SandboxCreate(self, request: Any) -> Message:
        env: dict[str, str] = {}
        for secret_id in request.definition.secret_ids:
            env |= self._secrets[secret_id]
        made = self._create(f"sb-{_letters(22)}", request, env)
        return api.SandboxCreateResponse(
            sandbox_id=made.id, metadata=api.SandboxHandleMetadata(app_id=made.app_id)
        )

    def SandboxCreateV2(self, request: Any) -> Message:
        if request.definition.resources.gpu_config.count:
            raise GRPCError(Status.INVALID_ARGUMENT, "GPUs are not supported by V2 Sandboxes")
        env: dict[str, str] = {}
        for source in request.secret_sources:
            if source.WhichOneof("source") == "env":
                env |= dict(source.env.contents)
            else:
                env |= self._secrets[source.secret_id]
        made = self._create(f"sb-v2-{_letters(26)}", request, env)
        return api.SandboxCreateV2Response(
            sandbox_id=made.id,
            task_id=made.task_id,
            metadata=api.SandboxHandleMetadata(app_id=made.app_id),
        )

    def _create(self, sandbox_id: str, request: Any, env: dict[str, str]) -> Sandbox:
        wanted = request.definition
        if self.quota is not None:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, self.quota)
        _check(wanted)
        if request.app_id not in self.apps.values():
            raise GRPCError(Status.NOT_FOUND, f"App '{request.app_id}' not found")
        with self.lock:
            living = sum(self.processes.get(one.job).state != "ended" for one in self._all())
            if self.limit is not None and living >= self.limit:
                raise GRPCError(
                    Status.RESOURCE_EXHAUSTED,
                    f"the workspace limit is {self.limit} Sandboxes, with {living} "
                    "currently running",
                )
            if wanted.name and self._named(request.app_id, wanted.name):
                raise GRPCError(
                    Status.ALREADY_EXISTS, f"Sandbox with name '{wanted.name}' already exists"
                )
            made = Sandbox(
                id=sandbox_id,
                app_id=request.app_id,
                definition=wanted,
                created_wall_s=time.time() + next(self._clock) * 1e-6,  # never repeated
                job=sandbox_id,
                tags={tag.tag_name: tag.tag_value for tag in request.tags},
            )
            self.processes.start(
                wanted.entrypoint_args,
                {**env, "MODAL_SANDBOX_ID": sandbox_id, "MODAL_TASK_ID": made.task_id},
                timeout_s=wanted.timeout_secs,
                job_id=sandbox_id,
                grace_s=GRACE_S,
                held=self.starved and wanted.resources.gpu_config.count > 0,
            )
            self.sandboxes[sandbox_id] = made
        return made

    def SandboxGetTaskId(self, request: Any) -> Message:
        made, job = self._known(request.sandbox_id)
        if job.started_wall_s:
            return api.SandboxGetTaskIdResponse(task_id=made.task_id)
        return api.SandboxGetTaskIdResponse(
            task_result=self._result(made, job) if job.state == "ended" else None
        )

    SandboxGetTaskIdV2 = SandboxGetTaskId

    def SandboxWait(self, request: Any) -> Message:
        made, job = self._known(request.sandbox_id)
        result = self._result(made, job)
        return api.SandboxWaitResponse(
            result=result, metadata=api.SandboxHandleMetadata(result=result, app_id=made.app_id)
        )

    SandboxWaitV2 = SandboxWait

    def SandboxGetFromName(self, request: Any) -> Message:
        return self._from_name(request, v1=True)

    def SandboxGetFromNameV2(self, request: Any) -> Message:
        return self._from_name(request, v1=False)

    def _from_name(self, request: Any, *, v1: bool) -> Message:
        app_id = self.apps.get((request.environment_name, request.app_name), "")
        ended = request.include_terminated and not v1
        result = [m for m in self._named(app_id, request.sandbox_name, ended=ended) if m.v1 is v1]
        if not result:
            raise GRPCError(
                Status.NOT_FOUND, f"Sandbox with name '{request.sandbox_name}' not found"
            )
        return api.SandboxGetFromNameResponse(
            sandbox_id=result[-1].id, metadata=api.SandboxHandleMetadata(app_id=app_id)
        )

    def SandboxList(self, request: Any) -> Message:
        return self._list(request, (made for made in self._all() if made.v1))

    def SandboxListV2(self, request: Any) -> Message:
        if request.include_finished and not self.lists_ended:
            raise GRPCError(Status.UNIMPLEMENTED, "include_finished is not supported")
        return self._list(request, self._all())

    def _list(self, request: Any, among: Iterable[Sandbox]) -> Message:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        before = request.before_timestamp or float("inf")
        result = [
            made
            for made in among
            if made.app_id == request.app_id
            and made.created_wall_s < before
            and wanted.items() <= made.tags.items()
            and (request.include_finished or self.processes.get(made.job).state != "ended")
        ]
        result.sort(key=lambda made: made.created_wall_s, reverse=True)
        return api.SandboxListResponse(sandboxes=[self._info(made) for made in result[:PAGE]])

    def _info(self, made: Sandbox) -> api.SandboxInfo:
        job = self.processes.get(made.job)
        result = self._result(made, job)
        return api.SandboxInfo(
            id=made.id,
            app_id=made.app_id,
            name=made.definition.name,
            created_at=made.created_wall_s,
            timeout_secs=made.definition.timeout_secs,
            image_id=made.definition.image_id,
            tags=_tags(made.tags),
            task_info=api.TaskInfo(
                id=made.task_id,
                started_at=job.started_wall_s,
                finished_at=job.ended_wall_s,
                result=result,
            ),
            metadata=api.SandboxHandleMetadata(result=result, app_id=made.app_id),
        )

    def SandboxTagsGet(self, request: Any) -> Message:
        return api.SandboxTagsGetResponse(tags=_tags(self._known(request.sandbox_id)[0].tags))

    SandboxTagsGetV2 = SandboxTagsGet

    def SandboxTagsSet(self, request: Any) -> Message:
        made, _ = self._known(request.sandbox_id)
        made.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return Empty()

    SandboxTagsSetV2 = SandboxTagsSet

    def SandboxTerminate(self, request: Any) -> Message:
        made, _ = self._known(request.sandbox_id)
        self.processes.kill(made.job, "cancelled")
        return api.SandboxTerminateResponse()

    SandboxTerminateV2 = SandboxTerminate

    # Parts of responses

    def job_of_task(self, task_id: str) -> str | None:
        return next((made.job for made in self._all() if made.task_id == task_id), None)

    def _all(self) -> list[Sandbox]:
        with self.lock:
            return list(self.sandboxes.values())

    def _known(self, sandbox_id: str) -> tuple[Sandbox, Job]:
        made = self.sandboxes.get(sandbox_id)
        if made is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with ID '{sandbox_id}' not found")
        return made, self.processes.get(made.job)

    def _named(self, app_id: str, name: str, *, ended: bool = False) -> list[Sandbox]:
        return [
            made
            for made in self._all()
            if (made.app_id, made.definition.name) == (app_id, name)
            and (ended or self.processes.get(made.job).state != "ended")
        ]

    def _result(self, made: Sandbox, job: Job) -> api.GenericResult | None:
        if job.state != "ended":
            return None
        status = _ENDED.get(job.ended_by)
        if made.stopped_from_outside:
            status = api.GenericResult.GENERIC_STATUS_TERMINATED
        if status is None:
            status = (
                api.GenericResult.GENERIC_STATUS_FAILURE
                if job.exit_code
                else api.GenericResult.GENERIC_STATUS_SUCCESS
            )
        return api.GenericResult(status=status, exitcode=job.exit_code or 0)


def _check(wanted: Any) -> None:
    """Validate a definition like Modal."""

    def need(good: bool, message: str) -> None:
        if not good:
            raise GRPCError(Status.INVALID_ARGUMENT, message)

    gpu = wanted.resources.gpu_config
    need(0 < wanted.timeout_secs <= LONGEST_S, f"timeout must be between 1 and {LONGEST_S} seconds")
    need(
        not gpu.count or (gpu.gpu_type.rstrip("!+") in GPUS and gpu.count <= MOST_GPUS),
        f"invalid GPU configuration {gpu.gpu_type}:{gpu.count}",
    )
    need(
        not wanted.name or _NAME.fullmatch(wanted.name) is not None,
        f"invalid Sandbox name {wanted.name!r}",
    )


def _tags(tags: dict[str, str]) -> list[api.SandboxTag]:
    return [api.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]


def _letters(count: int) -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(count))


def _base64(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
