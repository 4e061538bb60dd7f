"""Starting one Sandbox: its image, and a name that makes it the only one of its launch key.

``Sandbox.create`` with a GPU does not return before the Sandbox is scheduled, for up to 21
minutes, and if it is cancelled meanwhile the SDK terminates the Sandbox. No launch may wait so long
for a machine, so such a Sandbox is created through a client of its own, and looked for by its name
through ours. As soon as it is there the first client is closed: whatever still waits in it ends
without a call, and the Sandbox stays queued.

Deploying a function and ``spawn`` would give an id at once instead. But a call of a function has
neither a name nor tags, so a launch whose answer was lost could not be found again; Modal
restarts it on its own when it is preempted, under an identity that the run has replaced by then;
and its image and code are fixed when it is deployed.

Images are built before, once, because a Sandbox would do it inside ``create``. Modal keeps what it
has built and goes on building when nobody waits.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import modal
import modal.exception as told

from executors.base import ExecutorConfig, LaunchRefused, ReplicaSpec, RetryLater
from executors.launching import DEPLOYMENT_LABEL, labels_of
from executors.modal.client import Account
from executors.modal.options import MAX_LIFETIME_S, Machine, Options
from executors.modal.status import of_key

AT_ONCE_S = 1.0
"""How long a Sandbox with a GPU is given to be scheduled before it is looked for by its name."""

LOOK_S = 0.5
BUILT_LATER_S = 15.0

_NOT_IN_TAGS = re.compile(r"[^a-zA-Z0-9._-]")
_MAX_TAG = 63


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One Sandbox to be made."""

    spec: ReplicaSpec
    command: Sequence[str]
    options: Options
    machine: Machine
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    requirements: tuple[str, ...] = ()


class Launcher:
    """Starts Sandboxes in one App. What it remembers it could ask for again."""

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
        except LaunchRefused:  # what we remember may be gone there
            self._apps.clear()
            self._images.clear()
            raise

    async def app_id(self, environment: str) -> str | None:
        """Our App; None if there is none, and then there are no Sandboxes of ours."""
        try:
            return (await self._app(environment, create=False)).app_id
        except told.NotFoundError:
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
                expect=() if create else (told.NotFoundError,),
            )
        return app

    async def _start(self, app: modal.App, app_id: str, launch: Launch) -> str:
        key = launch.spec.launch_key
        known = await of_key(self._account, app_id, self._config.deployment, key)
        if known:
            return known[0].id
        image = await self._image(app, launch)
        try:
            if launch.machine.gpu is None:
                return await self._create(self._account.client, app, launch, image)
            return await self._create_queued(app, launch, image)
        except (told.AlreadyExistsError, told.ConflictError) as error:
            taken = error  # in conflict is one that ended before it had a machine
        living = await self._living(launch)
        if living is not None:
            tags = await self._account.call(living.get_tags.aio())
            if tags.get(DEPLOYMENT_LABEL) == self._config.deployment:
                return str(living.object_id)
            raise LaunchRefused(
                f"{taken} (it is not ours: two deployments need an App each, see the option app)"
            )
        ended = await of_key(self._account, app_id, self._config.deployment, key)
        if ended:
            return ended[0].id
        raise (
            self._account.said(taken)
            if isinstance(taken, told.ConflictError)
            else RetryLater(f"{taken}, and has ended since")
        )

    async def _image(self, app: modal.App, launch: Launch) -> modal.Image:
        """The image of a launch, built. Raises :class:`RetryLater` while Modal is at it."""
        spec, options = launch.spec, launch.options
        tag = spec.image or options.image
        wanted = options.requirements
        if wanted is None:  # in somebody's own image the bootstrap installs only what it lacks
            wanted = () if tag else launch.requirements
        key = (tag, wanted, options.python_version, options.add_python, options.registry_secret,
               options.extra_index_url, options.environment)  # fmt: skip
        built = self._images.get(key)
        if built is None:
            if tag:
                made = modal.Image.from_registry(
                    tag, self._registry_secret(options), add_python=options.add_python or None
                )
            else:
                made = modal.Image.debian_slim(options.python_version)
            if wanted:
                made = made.pip_install(*wanted, extra_index_url=options.extra_index_url or None)
            built = self._images[key] = await self._build(made, app, options.build_timeout_s)
        return built

    async def _build(self, image: modal.Image, app: modal.App, limit_s: float) -> modal.Image:
        try:
            async with asyncio.timeout(limit_s):
                return await self._account.call(image.build.aio(app), timeout_s=2 * limit_s)
        except TimeoutError as error:
            raise RetryLater(
                f"Modal is still building the image after {limit_s:g} s; it goes on by itself",
                after_s=BUILT_LATER_S,
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
        spec, environment = launch.spec, launch.options.environment or None
        volumes: dict[Any, Any] = {
            path: modal.Volume.from_name(
                name, environment_name=environment, create_if_missing=True, client=client
            )
            for path, name in launch.options.volumes.items()
        }
        sandbox = await self._account.call(
            modal.Sandbox.create.aio(
                *launch.command,
                app=app,
                name=spec.launch_key,
                tags=tags(self._config, spec),
                image=image,
                env=dict(launch.env),
                secrets=[modal.Secret.from_dict(dict(launch.secrets))] if launch.secrets else [],
                timeout=math.ceil(spec.timeout_s or MAX_LIFETIME_S),
                region=spec.region or None,
                gpu=launch.machine.gpu,
                cpu=launch.machine.cpu,
                memory=launch.machine.memory,
                volumes=volumes,
                client=client,
            ),
            timeout_s=timeout_s,
            expect=(told.AlreadyExistsError, told.ConflictError),
        )
        await sandbox.detach.aio()  # type: ignore[no-untyped-call]
        return str(sandbox.object_id)

    async def _create_queued(self, app: modal.App, launch: Launch, image: modal.Image) -> str:
        """Create it and do not wait for a machine; see above."""
        limit_s = self._account.timeout_s
        patient = await self._account.another()
        creating = asyncio.create_task(
            self._create(patient, app, launch, image, timeout_s=MAX_LIFETIME_S)
        )
        try:
            async with asyncio.timeout(limit_s):
                wait_s = AT_ONCE_S
                while True:
                    await asyncio.wait((creating,), timeout=wait_s)
                    if creating.done():
                        return creating.result()
                    living = await self._living(launch)
                    if living is not None:
                        return str(living.object_id)
                    wait_s = LOOK_S
        except TimeoutError as error:
            raise RetryLater(
                f"Modal did not take {launch.spec.launch_key} within {limit_s:g} s"
            ) from error
        finally:
            # Closed, never cancelled: that would terminate the Sandbox.
            await patient.close.aio()
            await asyncio.wait((creating,))
            creating.exception()  # looked at, so that it is not reported as forgotten

    async def _living(self, launch: Launch) -> modal.Sandbox | None:
        """The living Sandbox of this name, whoever's."""
        try:
            return await self._account.call(
                modal.Sandbox.from_name.aio(
                    self._app_name,
                    launch.spec.launch_key,
                    environment_name=launch.options.environment or None,
                    client=self._account.client,
                ),
                expect=(told.NotFoundError,),
            )
        except told.NotFoundError:
            return None


def tags(config: ExecutorConfig, spec: ReplicaSpec) -> dict[str, str]:
    """Our labels as Modal takes them: at most 63 letters, digits, dots, dashes, underscores."""
    return {
        _NOT_IN_TAGS.sub("-", name)[:_MAX_TAG]: _NOT_IN_TAGS.sub("-", value)[:_MAX_TAG] or "-"
        for name, value in labels_of(config, spec).items()
    }
