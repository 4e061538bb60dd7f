"""Start one Sandbox: its image, and a name that makes it unique for its launch key.

``Sandbox.create`` with a GPU returns only when the Sandbox is scheduled, after up to 21 minutes,
and when it is cancelled the SDK terminates the Sandbox. A launch must not wait that long, so such a
Sandbox is created through a separate client and looked up by its name through the account's client.
Once it is found, the separate client is closed: pending calls in it end without a request, and the
Sandbox stays queued.

Deploying a function and calling ``spawn`` would return an id at once. But a function call has
neither a name nor tags, so a launch whose response was lost could not be found again; Modal
restarts a preempted call by itself, under an identity that the run has replaced by then; and the
image and code are fixed at deployment.

Images are built first, because ``create`` would otherwise build them. Modal caches images and
continues a build without a waiting client.
"""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from typing import Any

import modal
import modal.exception as modal_errors

from executors.base import ExecutorConfig, JobRequest, LaunchRefused, ReplicaSpec, RetryLater
from executors.bootstrap.command import command
from executors.launching import DEPLOYMENT_LABEL, labels_of
from executors.modal.client import Account
from executors.modal.options import MAX_LIFETIME_S, Machine, Options
from executors.modal.status import of_key

SCHEDULE_S = 1.0
"""Time that a Sandbox with a GPU has to be scheduled before it is looked up by its name."""

LOOKUP_S = 0.5
BUILD_RETRY_S = 15.0

_NOT_IN_TAGS = re.compile(r"[^a-zA-Z0-9._-]")
_MAX_TAG = 63


@dataclass(frozen=True)
class Launch:
    """One Sandbox to create."""

    job: JobRequest
    options: Options
    machine: Machine


class Launcher:
    """Starts Sandboxes in one App. Its state is only a cache."""

    def __init__(self, account: Account, config: ExecutorConfig, app_name: str) -> None:
        self._account = account
        self._config = config
        self._app_name = app_name
        self._apps: dict[modal.Client, modal.App] = {}
        self._images: dict[Any, modal.Image] = {}

    async def start(self, launch: Launch) -> tuple[str, str]:
        """The ids of the one Sandbox of this launch key, ended or not, and of its App."""
        try:
            app = await self._app(launch.options.environment, create=True)
            assert app.app_id is not None
            return await self._start(app, app.app_id, launch), app.app_id
        except LaunchRefused:  # a cached App or image can have been deleted
            self._apps.clear()
            self._images.clear()
            raise

    async def app_id(self, environment: str) -> str | None:
        """The id of the App; None if it does not exist, and then the deployment has no
        Sandboxes."""
        try:
            return (await self._app(environment, create=False)).app_id
        except modal_errors.NotFoundError:
            return None

    async def _app(self, environment: str, *, create: bool) -> modal.App:
        client = self._account.client
        app = self._apps.get(client)
        if app is None:
            app = self._apps[client] = await self._account.call(
                modal.App.lookup.aio(
                    self._app_name,
                    environment_name=environment or None,
                    create_if_missing=create,
                    client=client,
                ),
                expect=() if create else (modal_errors.NotFoundError,),
            )
        return app

    async def _start(self, app: modal.App, app_id: str, launch: Launch) -> str:
        key = launch.job.spec.launch_key
        existing = await of_key(self._account, app_id, self._config.deployment, key)
        if existing:
            return existing[0].id
        image = await self._image(app, launch)
        try:
            if launch.machine.gpu is None:
                return await self._create(self._account.client, app, launch, image)
            return await self._create_queued(app, launch, image)
        except (modal_errors.AlreadyExistsError, modal_errors.ConflictError) as error:
            taken = error  # ConflictError: a Sandbox that ended before it had a machine
        living = await self._living(launch)
        if living is not None:
            tags = await self._account.call(living.get_tags.aio())
            if tags.get(DEPLOYMENT_LABEL) == self._config.deployment:
                return str(living.object_id)
            raise LaunchRefused(
                f"{taken} (it belongs to another deployment: give each deployment its own App by "
                "the option app)"
            )
        ended = await of_key(self._account, app_id, self._config.deployment, key)
        if ended:
            return ended[0].id
        raise (
            self._account.classified(taken)
            if isinstance(taken, modal_errors.ConflictError)
            else RetryLater(f"{taken}, and has ended since")
        )

    async def _image(self, app: modal.App, launch: Launch) -> modal.Image:
        """The built image of a launch. Raises :class:`RetryLater` while Modal builds it."""
        options, code = launch.options, launch.job.code
        tag = launch.job.spec.image or options.image
        requirements = options.requirements
        if requirements is None:  # in a custom image the bootstrap installs missing requirements
            requirements = () if tag or code is None else code.requirements
        key = (
            tag,
            requirements,
            options.python_version,
            options.add_python,
            options.registry_secret,
            options.extra_index_url,
            options.environment,
        )
        built = self._images.get(key)
        if built is None:
            if tag:
                image = modal.Image.from_registry(
                    tag, self._registry_secret(options), add_python=options.add_python or None
                )
            else:
                image = modal.Image.debian_slim(options.python_version)
            if requirements:
                image = image.pip_install(
                    *requirements, extra_index_url=options.extra_index_url or None
                )
            built = self._images[key] = await self._build(image, app, options.build_timeout_s)
        return built

    async def _build(self, image: modal.Image, app: modal.App, limit_s: float) -> modal.Image:
        try:
            async with asyncio.timeout(limit_s):
                return await self._account.call(image.build.aio(app), timeout_s=2 * limit_s)
        except TimeoutError as error:
            raise RetryLater(
                f"Modal is still building the image after {limit_s:g} s; it continues by itself",
                after_s=BUILD_RETRY_S,
            ) from error

    def _registry_secret(self, options: Options) -> modal.Secret | None:
        if not options.registry_secret:
            return None
        return modal.Secret.from_name(
            options.registry_secret,
            environment_name=options.environment or None,
            client=self._account.client,
        )

    async def _create(
        self,
        client: modal.Client,
        app: modal.App,
        launch: Launch,
        image: modal.Image,
        *,
        timeout_s: float | None = None,
    ) -> str:
        job, spec = launch.job, launch.job.spec
        environment = launch.options.environment or None
        volumes: dict[Any, Any] = {
            path: modal.Volume.from_name(
                name, environment_name=environment, create_if_missing=True, client=client
            )
            for path, name in launch.options.volumes.items()
        }
        sandbox = await self._account.call(
            modal.Sandbox.create.aio(
                *command(job.entrypoint, job.args, code=job.code),
                app=app,
                name=spec.launch_key,
                tags=tags(self._config, spec),
                image=image,
                env={"PYTHONUNBUFFERED": "1", **job.env},
                secrets=[modal.Secret.from_dict(dict(job.secrets))] if job.secrets else [],
                timeout=math.ceil(spec.timeout_s or MAX_LIFETIME_S),
                region=spec.region or None,
                gpu=launch.machine.gpu,
                cpu=launch.machine.cpu,
                memory=launch.machine.memory,
                volumes=volumes,
                client=client,
            ),
            timeout_s=timeout_s,
            expect=(modal_errors.AlreadyExistsError, modal_errors.ConflictError),
        )
        await sandbox.detach.aio()  # type: ignore[no-untyped-call]
        return str(sandbox.object_id)

    async def _create_queued(self, app: modal.App, launch: Launch, image: modal.Image) -> str:
        """Create a Sandbox without waiting for a machine; see the module's docstring."""
        limit_s = self._account.timeout_s
        client = await self._account.another()
        creating = asyncio.create_task(
            self._create(client, app, launch, image, timeout_s=MAX_LIFETIME_S)
        )
        try:
            async with asyncio.timeout(limit_s):
                wait_s = SCHEDULE_S
                while True:
                    await asyncio.wait((creating,), timeout=wait_s)
                    if creating.done():
                        return creating.result()
                    living = await self._living(launch)
                    if living is not None:
                        return str(living.object_id)
                    wait_s = LOOKUP_S
        except TimeoutError as error:
            raise RetryLater(
                f"Modal did not accept {launch.job.spec.launch_key} within {limit_s:g} s"
            ) from error
        finally:
            # Closed, never cancelled: that would terminate the Sandbox.
            await client.close.aio()
            await asyncio.wait((creating,))
            creating.exception()  # retrieved, so that asyncio does not log it

    async def _living(self, launch: Launch) -> modal.Sandbox | None:
        """The live Sandbox of this name, of any deployment."""
        try:
            return await self._account.call(
                modal.Sandbox.from_name.aio(
                    self._app_name,
                    launch.job.spec.launch_key,
                    environment_name=launch.options.environment or None,
                    client=self._account.client,
                ),
                expect=(modal_errors.NotFoundError,),
            )
        except modal_errors.NotFoundError:
            return None


def tags(config: ExecutorConfig, spec: ReplicaSpec) -> dict[str, str]:
    """The labels as valid tags: at most 63 letters, digits, dots, dashes and underscores."""
    return {
        _NOT_IN_TAGS.sub("-", name)[:_MAX_TAG]: _NOT_IN_TAGS.sub("-", value)[:_MAX_TAG] or "-"
        for name, value in labels_of(config, spec).items()
    }
