"""Read Modal's records of Sandboxes and convert them into :class:`~executors.base.ReplicaStatus`.

``Sandbox.list`` returns live Sandboxes without times, and ``Sandbox.from_name`` finds an ended one
only if it had no GPU. The underlying API call, ``SandboxListV2``, also returns tags, times, the
exact result and, on request, ended Sandboxes. It is used here through the SDK's client and
messages. That interface is not public, so the SDK is pinned. ``include_finished`` is part of the
published messages, but no method of the SDK uses it: if Modal refuses it, a key whose Sandbox has
ended is not found, and all operations by a handle still work.

States are pure functions of a record. Modal's results (``GenericStatus``)::

    SUCCESS, FAILURE              done or error by the exit code
    KERNEL_OOM_KILL, ..EVICTION   out of memory of the Sandbox or of the machine
    TIMEOUT                       deadline
    TERMINATED                    cancelled if it has the cancel tag, otherwise preempted
    INTERNAL_FAILURE              preempted, as in Modal's SDK

Modal does not document how it reports a preempted Sandbox. A Sandbox that a user stops on Modal's
pages counts as preempted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import modal
import modal.exception as modal_errors
from modal._utils.async_utils import synchronize_api
from modal_proto import api_pb2 as api

from executors.base import Cause, JobState, PendingCause, ReplicaStatus
from executors.launching import DEPLOYMENT_LABEL, KEY_LABEL, exit_cause
from executors.modal.client import Account

CANCELLED_TAG = "archipelago-cancelled"

KILLED_EXIT = 137
DEADLINE_EXIT = 124

_DONE = api.GenericResult.GENERIC_STATUS_SUCCESS
_FAILED = api.GenericResult.GENERIC_STATUS_FAILURE
_STOPPED = api.GenericResult.GENERIC_STATUS_TERMINATED

_CAUSES = {
    api.GenericResult.GENERIC_STATUS_TIMEOUT: (Cause.DEADLINE, "reached its deadline"),
    _STOPPED: (
        Cause.PREEMPTED,
        "terminated: Modal reclaimed the machine, or a user stopped the Sandbox or its App",
    ),
    api.GenericResult.GENERIC_STATUS_INTERNAL_FAILURE: (
        Cause.PREEMPTED,
        "Modal reports an internal failure: the machine was reclaimed or lost",
    ),
    api.GenericResult.GENERIC_STATUS_KERNEL_OOM_KILL: (
        Cause.OUT_OF_MEMORY,
        "out of memory",
    ),
    api.GenericResult.GENERIC_STATUS_MEMORY_MANAGER_EVICTION: (
        Cause.OUT_OF_MEMORY,
        "evicted: the machine ran out of memory and the Sandbox used more than its request",
    ),
    api.GenericResult.GENERIC_STATUS_MEMORY_THRASHING_EVICTION: (
        Cause.OUT_OF_MEMORY,
        "evicted: the machine ran out of memory and the Sandbox used more than its request",
    ),
    api.GenericResult.GENERIC_STATUS_INIT_FAILURE: (Cause.ERROR, "could not be started"),
}

# The client warns about each use of the private interface; see above.
warnings.filterwarnings("ignore", category=modal_errors.InternalAPIWarning)


async def _page(client: Any, request: api.SandboxListRequest) -> api.SandboxListResponse:
    """Read one page. Runs in the SDK's event loop, where clients and connections live."""
    metadata = [
        (name, value)
        for name, value in await client.get_input_plane_metadata("")
        if name == "x-modal-auth-token"
    ]
    page: api.SandboxListResponse = await client.stub.SandboxListV2(request, metadata=metadata)
    return page


_list_page: Any = synchronize_api(_page)  # type: ignore[no-untyped-call]


async def living(account: Account, app_id: str, deployment: str) -> list[api.SandboxInfo]:
    """Records of every Sandbox of a deployment that has not ended, oldest first."""
    found: list[api.SandboxInfo] = []
    before = 0.0
    while True:
        request = _request(app_id, {DEPLOYMENT_LABEL: deployment}, before=before)
        page = await account.call(_list_page.aio(account.client, request))
        if not page.sandboxes:
            return sorted(found, key=lambda record: (record.created_at, record.id))
        found += page.sandboxes
        before = page.sandboxes[-1].created_at


async def of_key(
    account: Account, app_id: str, deployment: str, launch_key: str
) -> list[api.SandboxInfo]:
    """Records of a launch key, ended or not, newest first. Normally one or none."""
    request = _request(
        app_id, {DEPLOYMENT_LABEL: deployment, KEY_LABEL: launch_key}, include_finished=True
    )
    try:
        page = await account.call(
            _list_page.aio(account.client, request),
            expect=(modal_errors.InvalidError, modal_errors.UnimplementedError),
        )
    except (modal_errors.InvalidError, modal_errors.UnimplementedError):
        return []
    return list(page.sandboxes)


def _request(
    app_id: str, tags: Mapping[str, str], *, before: float = 0.0, **fields: Any
) -> api.SandboxListRequest:
    return api.SandboxListRequest(
        app_id=app_id,
        before_timestamp=before,
        tags=[api.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()],
        **fields,
    )


def tags_of(record: api.SandboxInfo) -> dict[str, str]:
    return {tag.tag_name: tag.tag_value for tag in record.tags}


def status_of(record: api.SandboxInfo) -> ReplicaStatus:
    """The status of a Sandbox from its record."""
    task = record.task_info
    result = task.result if task.result.status else record.metadata.result
    started_wall_s = task.started_at or None
    if not result.status:
        running = started_wall_s is not None
        return ReplicaStatus(
            state=JobState.RUNNING if running else JobState.PENDING,
            phase="running" if running else "scheduling",
            pending=None if running else _pending_cause(task),
            message="" if running or task.id else "Modal has not assigned a machine yet",
            started_wall_s=started_wall_s,
            deadline_wall_s=_deadline(record, started_wall_s),
        )
    cause, exit_code, message = _end(result, cancelled=CANCELLED_TAG in tags_of(record))
    return ReplicaStatus(
        state=JobState.ENDED,
        cause=cause,
        exit_code=exit_code,
        message=message,
        phase=api.GenericResult.GenericStatus.Name(result.status).removeprefix("GENERIC_STATUS_"),
        started_wall_s=started_wall_s,
        ended_wall_s=task.finished_at or None,
        deadline_wall_s=_deadline(record, started_wall_s),
    )


def _pending_cause(task: api.TaskInfo) -> PendingCause:
    """A Sandbox has a task once it has a machine: https://modal.com/docs/guide/sandbox
    (Lifecycle)."""
    return PendingCause.STARTING if task.id else PendingCause.CAPACITY


async def status_by_id(account: Account, sandbox_id: str) -> ReplicaStatus:
    """The status of a Sandbox that is missing from the listing, from the SDK's public methods."""
    try:
        sandbox = await account.call(
            modal.Sandbox.from_id.aio(sandbox_id, client=account.client),
            expect=(modal_errors.NotFoundError,),
        )
    except modal_errors.NotFoundError as error:
        return ReplicaStatus(state=JobState.ENDED, cause=Cause.LOST, message=str(error))
    code = sandbox.returncode
    if code is None:
        return ReplicaStatus(state=JobState.RUNNING)
    result = api.GenericResult(status=_DONE if code == 0 else _FAILED, exitcode=code)
    try:
        ends = (modal_errors.SandboxTimeoutError, modal_errors.SandboxTerminatedError)
        await account.call(sandbox.wait.aio(), expect=ends)  # returns at once
    except modal_errors.SandboxTimeoutError:
        result.status = api.GenericResult.GENERIC_STATUS_TIMEOUT
    except modal_errors.SandboxTerminatedError:
        result.status = _STOPPED
    cause, exit_code, message = _end(result, cancelled=False)
    return ReplicaStatus(state=JobState.ENDED, cause=cause, exit_code=exit_code, message=message)


def _end(result: api.GenericResult, *, cancelled: bool) -> tuple[Cause, int | None, str]:
    """Cause, exit code and message of a result."""
    message = result.exception.strip()
    if result.status in (_DONE, _FAILED):
        code = result.exitcode
        cause, why = exit_cause(code)
        if cause is Cause.DONE and result.status == _FAILED:
            cause, why = Cause.ERROR, "Modal reports a failure, with exit code 0"
        return cause, code, message or why
    if result.status == _STOPPED and cancelled:
        return Cause.CANCELLED, KILLED_EXIT, message or "cancelled"
    cause, why = _CAUSES.get(result.status, (Cause.ERROR, "ended for an unknown reason"))
    exit_code = DEADLINE_EXIT if cause is Cause.DEADLINE else result.exitcode or None
    return cause, exit_code, f"{why}: {message}" if message else why


def _deadline(record: api.SandboxInfo, started_wall_s: float | None) -> float | None:
    if started_wall_s is None or not record.timeout_secs:
        return None
    return started_wall_s + record.timeout_secs
