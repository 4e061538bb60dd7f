"""Description of the backend ``nohup``."""

from __future__ import annotations

from dataclasses import dataclass

from executors.backend import Backend, Variable
from executors.catalogue import Hardware, Table
from executors.local import options as local
from executors.options import Scope, option


@dataclass(frozen=True, kw_only=True)
class Options(local.Options):
    queue: str = option(
        label="Queue", scope=Scope.EXECUTOR, in_credential=True, help="Name of the queue"
    )
    priority: int = option(
        0, label="Priority", unit="points", minimum=0, maximum=9, scope=Scope.POOL
    )


BACKEND = Backend(
    name="nohup",
    label="Detached processes",
    executor="archipelago_nohup.executor:NohupExecutor",
    hardware=Table(
        backend="nohup",
        hardware=(Hardware(backend="nohup", name="cpu", label="One process", price_usd_h=0.25),),
    ),
    options=Options,
    variables=(Variable(name="NOHUP_TOKEN", label="Token", required=True),),
    public_variables=frozenset({"NOHUP_REGION"}),
    console_url="https://nohup.example/jobs/{key}",
    on_server=True,
)
