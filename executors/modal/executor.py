"""Replicas as Modal Sandboxes: named by their launch key, tagged, detached from who starts them.

::

    App <deployment>   Sandbox <launch key>    one per attempt; Modal allows one living of a name
                       tags archipelago-deployment, archipelago-key, archipelago-replica
                            archipelago-cancelled, once we asked for its end
                       Secret, without a name  what only the replica may know

A launch asks for a Sandbox of its key first, because Modal allows a name again after its
Sandbox has ended. Two launches of one key at once make one Sandbox; that a job could begin and
end between the question of one launch and the request of another is left to the run, which would
see the incarnation of a replica that is over. :mod:`executors.modal.launch` says how a Sandbox is
started without waiting for a machine, :mod:`executors.modal.status` where its state is read.

``poll`` takes one listing of the deployment's living Sandboxes however many are asked for, and one
question for each that has ended. ``cancel`` leaves its mark, if it can, and terminates; Modal gives
no grace to speak of, so a run drains its replicas before.

Sandboxes without a GPU are not preempted, those with one can be at any time; Modal has neither
a spot price nor a choice (https://modal.com/docs/guide/preemption). No Sandbox outlives 24 hours.

Left out: functions, memory and filesystem snapshots, several machines per replica (``Cluster``).
API: https://modal.com/docs/reference/modal.Sandbox
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import modal
import modal.exception as told
from modal_proto import api_pb2 as api

from executors import launching
from executors.base import (
    Capabilities,
    CodeRef,
    ExecutorConfig,
    ExecutorError,
    LaunchRefused,
    LogLine,
    NeedsPerson,
    Problem,
    ReplicaHandle,
    ReplicaSpec,
    ReplicaStatus,
)
from executors.bootstrap.command import command
from executors.modal import logs as modal_logs
from executors.modal import options as modal_options
from executors.modal import status
from executors.modal.client import Account
from executors.modal.launch import Launch, Launcher
from executors.modal.logs import Entry, Position

AT_ONCE = 32
"""Questions and requests to end that are under way together."""

MARK_S = 5.0
"""How long a request to end a Sandbox is delayed by a mark that gets no answer, twice at most."""

LONGEST_LOG = timedelta(days=34)
"""Modal refuses to search more than 35 days."""

_NO_MACHINE = "task_id is not available yet"
"""How the SDK reports that a Sandbox has no machine, and so no log."""

T = TypeVar("T")


class ModalExecutor(launching.LaunchReplicas):
    """Sandboxes of one account. Options and credentials: ``docs/backends/modal.md``."""

    backend = "modal"
    capabilities = Capabilities(
        max_lifetime_s=modal_options.MAX_LIFETIME_S, regions=modal_options.REGIONS
    )

    def __init__(self, config: ExecutorConfig) -> None:
        options = modal_options.read(config.options, {})
        modal_options.check_deployment(config.deployment)
        self.config = config
        self.log_poll_s = options.log_poll_s
        self._account = Account(config.credentials, timeout_s=options.api_timeout_s)
        self._environment = options.environment or self._account.environment
        self._app_name = options.app or config.deployment
        self._launcher = Launcher(self._account, config, self._app_name)

    def ensure(
        self,
        specs: Sequence[ReplicaSpec],
        entrypoint: str,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        code: CodeRef | None = None,
    ) -> list[ReplicaHandle]:
        """See :meth:`executors.base.ServerlessExecutor.ensure`.

        ``code.requirements`` go into the image, unless that is somebody's own: Modal builds it
        once, and the bootstrap then finds them there.
        """
        request = launching.prepare(specs, entrypoint_args)
        for spec in request.specs:
            problems = modal_options.problems(self.config.options, spec)
            if problems:
                raise LaunchRefused("; ".join(f"{p.field}: {p.message}" for p in problems))

        def start(spec: ReplicaSpec) -> ReplicaHandle:
            options = dataclasses.replace(
                modal_options.read(self.config.options, spec.options),
                environment=self._environment,
            )
            plain, hidden = request.environment(spec, env=env, secrets=secrets)
            launch = Launch(
                spec=spec,
                command=command(entrypoint, request.args, code=code),
                options=options,
                machine=modal_options.machine(options, spec),
                env={"PYTHONUNBUFFERED": "1", **plain},
                secrets=hidden,
                requirements=code.requirements if code else (),
            )
            try:
                sandbox_id, app_id = self._account.run(self._launcher.start(launch))
            except ExecutorError as error:
                scrubbed = launching.scrub(str(error), hidden.values())
                if scrubbed != str(error):  # a traceback would show the cause
                    error.args, error.__cause__, error.__suppress_context__ = (
                        (scrubbed,),
                        None,
                        True,
                    )
                raise
            return self._handle(spec.launch_key, sandbox_id, app_id)

        return launching.launch_each(start, request.specs)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        return self._account.run(self._poll(handles)) if handles else []

    async def _poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        of_app: defaultdict[str, dict[str, ReplicaHandle]] = defaultdict(dict)
        for handle in handles:
            of_app[handle.data["app"]][handle.data["id"]] = handle
        found: dict[str, ReplicaStatus] = {}
        for app_id, wanted in of_app.items():
            if len(wanted) > 1:
                for record in await status.living(self._account, app_id, self.config.deployment):
                    found[record.id] = status.status_of(record)
            rest = [handle for sandbox_id, handle in wanted.items() if sandbox_id not in found]
            statuses = await _together(self._status(handle) for handle in rest)
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
        """Every Sandbox of our deployment that has not ended."""
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
        """See :mod:`executors.modal.logs`. With ``follow`` the log is asked for every
        ``log_poll_s``, and once more after the end, for lines that were still on their way."""
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
            time.sleep(self.log_poll_s)

    async def _read(self, handle: ReplicaHandle, after: Position) -> tuple[bool, list[Entry]]:
        """Whether the job has ended, and its log from the time of ``after`` on."""
        try:
            sandbox = await self._account.call(
                modal.Sandbox.from_id.aio(handle.data["id"], client=self._account.client),
                expect=(told.NotFoundError,),
            )
        except told.NotFoundError:
            return True, []
        # Known before reading: what was written before the end is then surely read.
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
            return ended, await self._account.call(_entries(found), expect=(told.ExecutionError,))
        except told.ExecutionError as error:
            if _NO_MACHINE in str(error):  # none was found yet, or ever
                return ended, []
            raise self._account.said(error) from None

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        self._account.run(_together(self._cancel(handle) for handle in handles))

    async def _cancel(self, handle: ReplicaHandle) -> None:
        call = self._account.call
        try:
            sandbox = await call(
                modal.Sandbox.from_id.aio(handle.data["id"], client=self._account.client),
                expect=(told.NotFoundError,),
            )
            if sandbox.returncode is not None:
                return
            with contextlib.suppress(ExecutorError):  # an end without the mark is better than none
                await self._mark(sandbox)
            await call(sandbox.terminate.aio(), expect=(told.NotFoundError,))
        except told.NotFoundError:
            return

    async def _mark(self, sandbox: modal.Sandbox) -> None:
        """Record on the Sandbox that we ask for its end. An end without this mark reads as a
        preemption."""
        call = self._account.call
        limit_s = min(MARK_S, self._account.timeout_s)
        tags = await call(sandbox.get_tags.aio(), timeout_s=limit_s, expect=(told.NotFoundError,))
        if status.CANCELLED_TAG not in tags:
            marked = {**tags, status.CANCELLED_TAG: "yes"}
            await call(
                sandbox.set_tags.aio(marked), timeout_s=limit_s, expect=(told.NotFoundError,)
            )

    def collect(self, handles: Sequence[ReplicaHandle], timeout: float) -> list[ReplicaStatus]:
        return launching.collect(self.poll, handles, timeout, every_s=self.log_poll_s)

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
        """What Modal tells of quotas and capacity only by refusing a launch is not known here."""
        found = modal_options.problems(self.config.options, spec)
        try:
            self.check()
        except NeedsPerson as error:
            is_option = isinstance(error.__cause__, told.NotFoundError)  # the environment
            field = "options" if is_option else "credential"
            found.append(Problem(field=field, message=str(error)))
        except LaunchRefused as error:
            found.append(Problem(field="options", message=str(error)))
        return found

    def _handle(self, launch_key: str, sandbox_id: str, app_id: str) -> ReplicaHandle:
        data = {"id": sandbox_id, "app": app_id}
        return ReplicaHandle(backend=self.backend, launch_key=launch_key, data=data)


async def _entries(found: AsyncIterator[Any]) -> list[Entry]:
    return [
        Entry(when=entry.timestamp, source=entry.source, text=entry.message)
        async for entry in found
    ]


async def _together(work: Iterator[Coroutine[Any, Any, T]]) -> list[T]:
    """Several calls, :data:`AT_ONCE` at a time. All are tried; then the first error is raised."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(each: Coroutine[Any, Any, T]) -> T:
        async with places:
            return await each

    found = await asyncio.gather(*(one(each) for each in work), return_exceptions=True)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return [result for result in found if not isinstance(result, BaseException)]
