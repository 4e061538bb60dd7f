"""The description of a backend: all that forms, credentials, prices and pages need of it.

Each backend's folder has a module ``backend`` with one :class:`Backend`, named ``BACKEND``. It
imports no SDK, so that every process can read it. :mod:`executors.registry` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from executors.catalogue import Table
from executors.options import Option, Scope, options_of, read


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A credential's value, named as the environment variable that the client's SDK reads.

    ``secret``: masked wherever it appears. ``long``: the form shows several lines. ``read`` turns
    the typed text into the stored one, and raises :class:`ValueError`.
    """

    name: str
    label: str
    help: str = ""
    secret: bool = True
    required: bool = False
    long: bool = False
    read: Callable[[str], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend.

    Args:
        name: identifier in the database, in documents and in ``executors/<name>``.
        label: name in forms and on pages.
        executor: ``module:Class`` of the executor. The module, and with it the SDK, is imported
            on first use.
        hardware: the machines that a pool can choose, and their prices.
        options: dataclass of :func:`executors.options.option` fields.
        variables: fields of its credential; empty where the backend needs no credential.
        public_variables: further variables of its SDK that are not secret.
        console_url: address of a job in the backend's own console, with names of the handle's
            ``data`` in braces; empty without one.
        on_server: jobs are processes of the server's own machine. They inherit its access to
            buckets, use its packages, and need the permission ``runs.use_local_backend``.
        role_stores: kinds of buckets (``s3``) that jobs open by their own role.
        demo_hardware: hardware of its replica in the mixed demo; empty to leave it out.
    """

    name: str
    label: str
    executor: str
    hardware: Table
    options: type[Any]
    variables: tuple[Variable, ...] = ()
    public_variables: frozenset[str] = field(default_factory=frozenset)
    console_url: str = ""
    on_server: bool = False
    role_stores: frozenset[str] = field(default_factory=frozenset)
    demo_hardware: str = ""

    @property
    def declared_options(self) -> Mapping[str, Option]:
        return options_of(self.options)

    @property
    def pool_options(self) -> frozenset[str]:
        """Options that any pool can set."""
        declared = self.declared_options.values()
        return frozenset(each.name for each in declared if each.scope is Scope.POOL)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check a pool's options. Raises :class:`ValueError`."""
        read(self.options, {}, options)

    def job_url(self, data: Mapping[str, Any]) -> str:
        """Address of a job in the backend's console; empty where there is none."""
        quoted = {name: quote(str(value), safe="") for name, value in data.items()}
        try:
            return self.console_url.format(**quoted)
        except KeyError:
            return ""


AWS_KEYS = (
    Variable(name="AWS_ACCESS_KEY_ID", label="Access key ID", required=True),
    Variable(name="AWS_SECRET_ACCESS_KEY", label="Secret access key", required=True),
    Variable(
        name="AWS_SESSION_TOKEN",
        label="Session token",
        help="Only for temporary keys. They expire and are not renewed.",
    ),
    Variable(name="AWS_REGION", label="Region", secret=False, help="e.g. eu-west-1"),
)
"""Variables of an AWS identity, for backends and S3 buckets alike."""
