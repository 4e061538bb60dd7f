"""Replicas as Modal Sandboxes: named by their launch key, tagged, and detached from their launcher.

::

    App <deployment>   Sandbox <launch key>    one per attempt; a name can have one live Sandbox
                       tags archipelago-deployment, archipelago-key, archipelago-replica
                            archipelago-cancelled, once its end was requested
                       Secret, unnamed         the replica's secrets

A launch first looks for a Sandbox of its key, because Modal frees a name when its Sandbox ends. Two
concurrent launches of one key create one Sandbox. A job that starts and ends between the lookup of
one launch and the request of another is not prevented here: the run would fence its outdated
incarnation. :mod:`executors.modal.launch` starts a Sandbox without waiting for a machine;
:mod:`executors.modal.status` reads its state.

``poll`` makes one request for the live Sandboxes of the deployment, and one for each that has
ended. ``cancel`` tags the Sandbox and terminates it. Modal has practically no grace period, so a
run drains its replicas first.

Sandboxes without a GPU are not preempted; those with a GPU can be at any time, and Modal has no
spot price (https://modal.com/docs/guide/preemption). No Sandbox lives longer than 24 hours.

Not supported: functions, memory and filesystem snapshots, several machines per replica
(``Cluster``). API: https://modal.com/docs/reference/modal.Sandbox
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import modal
import modal.exception as modal_errors
from modal_proto import api_pb2 as api

from executors import launching
from executors.base import (
    AccountError,
    Capabilities,
    ExecutorConfig,
    ExecutorError,
    JobRequest,
    LaunchRefused,
    LogLine,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
)
from executors.executor import Executor
from executors.modal import logs as modal_logs
from executors.modal import options as modal_options
from executors.modal import status
from executors.modal.client import Account
from executors.modal.launch import Launch, Launcher
from executors.modal.logs import Entry, Position
from executors.modal.options import Options

AT_ONCE = 32
"""Maximum number of concurrent requests."""

TAG_TIMEOUT_S = 5.0
"""Timeout of each of the two requests that tag a Sandbox before it is terminated."""

LONGEST_LOG = timedelta(days=34)
"""Modal refuses log searches over more than 35 days."""

_NO_MACHINE = "task_id is not available yet"
"""Part of the SDK's message for a Sandbox without a machine, which has no log."""

T = TypeVar("T")


class ModalExecutor(Executor):
    """Sandboxes of one account. Options and credentials: ``docs/backends/modal.md``."""

    backend = "modal"
    capabilities = Capabilities(
        max_lifetime_s=modal_options.MAX_LIFETIME_S, regions=modal_options.REGIONS
    )

    def __init__(self, config: ExecutorConfig) -> None:
        options = launching.job_options(Options, config.options, {})
        modal_options.check_deployment(config.deployment)
        self.config = config
        self.poll_s = options.log_poll_s
        self._account = Account(config.credentials, timeout_s=options.api_timeout_s)
        self._environment = options.environment or self._account.environment
        self._app_name = options.app or config.deployment
        self._launcher = Launcher(self._account, config, self._app_name)

    def start(self, job: JobRequest) -> ReplicaHandle:
        """Start one Sandbox.

        ``code.requirements`` are built into the default image, once; the bootstrap then finds them
        there. A custom image is not changed.
        """
        self.check_spec(job.spec)
        options = dataclasses.replace(self._options(job.spec), environment=self._environment)
        launch = Launch(job, options, modal_options.machine(options, job.spec))
        sandbox_id, app_id = self._account.run(self._launcher.start(launch))
        return self._handle(job.spec.launch_key, sandbox_id, app_id)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return self._account.run(self._poll(handles)) if handles else []

    async def _poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        by_app: defaultdict[str, dict[str, ReplicaHandle]] = defaultdict(dict)
        for handle in handles:
            by_app[handle.data["app"]][handle.data["id"]] = handle
        found: dict[str, ReplicaStatus] = {}
        for app_id, handles_by_id in by_app.items():
            if len(handles_by_id) > 1:
                for record in await status.living(self._account, app_id, self.config.deployment):
                    found[record.id] = status.status_of(record)
            rest = [
                handle for sandbox_id, handle in handles_by_id.items() if sandbox_id not in found
            ]
            statuses = await _gather(self._status(handle) for handle in rest)
            found |= {h.data["id"]: s for h, s in zip(rest, statuses, strict=True)}
        return [found[handle.data["id"]] for handle in handles]

    async def _status(self, handle: ReplicaHandle) -> ReplicaStatus:
        record = await self._record(handle)
        if record is not None:
            return status.status_of(record)
        return await status.status_by_id(self._account, handle.data["id"])

    async def _record(self, handle: ReplicaHandle) -> api.SandboxInfo | None:
        records = await status.of_key(
            self._account, handle.data["app"], self.config.deployment, handle.launch_key
        )
        return next((record for record in records if record.id == handle.data["id"]), None)

    def find(self, launch_key: str) -> ReplicaHandle | None:
        launching.check_launch_key(launch_key)
        return self._account.run(self._find(launch_key))

    async def _find(self, launch_key: str) -> ReplicaHandle | None:
        app_id = await self._launcher.app_id(self._environment)
        if app_id is None:
            return None
        records = await status.of_key(self._account, app_id, self.config.deployment, launch_key)
        return self._handle(launch_key, records[0].id, app_id) if records else None

    def live(self) -> list[ReplicaHandle]:
        """Every Sandbox of the deployment that has not ended."""
        return self._account.run(self._live())

    async def _live(self) -> list[ReplicaHandle]:
        app_id = await self._launcher.app_id(self._environment)
        if app_id is None:
            return []
        records = await status.living(self._account, app_id, self.config.deployment)
        return [
            self._handle(
                status.tags_of(record).get(launching.KEY_LABEL, record.name), record.id, app_id
            )
            for record in records
        ]

    def logs(
        self, handle: ReplicaHandle, *, after: str = "", follow: bool = False
    ) -> Iterator[LogLine]:
        """See :mod:`executors.modal.logs`. With ``follow`` the log is read every ``log_poll_s``,
        and once more after the end, for lines that arrive late."""
        reached = Position.read(after) if after else Position()
        known_ended = False
        while True:
            ended, entries = self._account.run(self._read(handle, reached))
            for line in modal_logs.lines(entries, reached, ended=ended):
                reached = Position.read(line.position)
                yield line
            if not follow or known_ended:
                return
            known_ended = ended
            time.sleep(self.poll_s)

    async def _read(self, handle: ReplicaHandle, after: Position) -> tuple[bool, list[Entry]]:
        """Whether the job has ended, and its log from the time of ``after`` on."""
        try:
            sandbox = await self._account.call(
                modal.Sandbox.from_id.aio(handle.data["id"], client=self._account.client),
                expect=(modal_errors.NotFoundError,),
            )
        except modal_errors.NotFoundError:
            return True, []
        # Read the state first: output written before the end is then complete.
        ended = sandbox.returncode is not None
        now = datetime.now(UTC)
        if after.micros:
            since = after.when - timedelta(milliseconds=1)
        else:
            record = await self._record(handle)
            since = now - LONGEST_LOG
            if record is not None and record.created_at:
                created = datetime.fromtimestamp(record.created_at, UTC)
                since = created - timedelta(seconds=modal_logs.MARGIN_S)
        until = now + timedelta(seconds=modal_logs.MARGIN_S)
        found = sandbox.logs.fetch.aio(since=max(since, now - LONGEST_LOG), until=until)
        try:
            return ended, await self._account.call(
                _entries(found), expect=(modal_errors.ExecutionError,)
            )
        except modal_errors.ExecutionError as error:
            if _NO_MACHINE in str(error):  # no machine was assigned
                return ended, []
            raise self._account.classified(error) from None

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        self._account.run(_gather(self._cancel(handle) for handle in handles))

    async def _cancel(self, handle: ReplicaHandle) -> None:
        call = self._account.call
        try:
            sandbox = await call(
                modal.Sandbox.from_id.aio(handle.data["id"], client=self._account.client),
                expect=(modal_errors.NotFoundError,),
            )
            if sandbox.returncode is not None:
                return
            with contextlib.suppress(ExecutorError):  # terminate even if the tag cannot be set
                await self._tag_cancelled(sandbox)
            await call(sandbox.terminate.aio(), expect=(modal_errors.NotFoundError,))
        except modal_errors.NotFoundError:
            return

    async def _tag_cancelled(self, sandbox: modal.Sandbox) -> None:
        """Tag the Sandbox as cancelled. An end without this tag counts as a preemption."""
        call = self._account.call
        limit_s = min(TAG_TIMEOUT_S, self._account.timeout_s)
        tags = await call(
            sandbox.get_tags.aio(), timeout_s=limit_s, expect=(modal_errors.NotFoundError,)
        )
        if status.CANCELLED_TAG not in tags:
            tagged = {**tags, status.CANCELLED_TAG: "yes"}
            await call(
                sandbox.set_tags.aio(tagged),
                timeout_s=limit_s,
                expect=(modal_errors.NotFoundError,),
            )

    def check(self) -> str:
        """The workspace of the token (https://modal.com/docs/guide/workspaces)."""
        return self._account.run(self._check())

    async def _check(self) -> str:
        client = self._account.client
        workspace = modal.Workspace.from_context(client=client)
        await self._account.call(workspace.hydrate.aio())
        where = f", environment {self._environment}" if self._environment else ""
        if self._environment:
            environment = modal.Environment.from_name(self._environment, client=client)
            await self._account.call(environment.hydrate.aio())
        return f"Modal workspace {workspace.name}{where}, App {self._app_name}"

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        """Check the credential and the options. Modal reports quotas and capacity only at a
        launch."""
        found = self.problems(spec)
        try:
            self.check()
        except AccountError as error:
            is_option = isinstance(error.__cause__, modal_errors.NotFoundError)  # the environment
            field = "options" if is_option else "credential"
            found.append(Problem(field=field, message=str(error)))
        except LaunchRefused as error:
            found.append(Problem(field="options", message=str(error)))
        return found

    def problems(self, spec: ReplicaSpec) -> list[Problem]:
        try:
            options = self._options(spec)
        except LaunchRefused as error:
            return [Problem(field="options", message=str(error))]
        return [*super().problems(spec), *modal_options.problems(options, spec)]

    def _options(self, spec: ReplicaSpec) -> Options:
        return launching.job_options(Options, self.config.options, spec.options)

    def _handle(self, launch_key: str, sandbox_id: str, app_id: str) -> ReplicaHandle:
        data = {"id": sandbox_id, "app": app_id}
        return ReplicaHandle(backend=self.backend, launch_key=launch_key, data=data)


async def _entries(found: AsyncIterator[Any]) -> list[Entry]:
    return [
        Entry(when=entry.timestamp, source=entry.source, text=entry.message)
        async for entry in found
    ]


async def _gather(work: Iterator[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines, :data:`AT_ONCE` at a time. All are run; then the first error is raised."""
    semaphore = asyncio.Semaphore(AT_ONCE)

    async def one(each: Coroutine[Any, Any, T]) -> T:
        async with semaphore:
            return await each

    results = await asyncio.gather(*(one(each) for each in work), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
