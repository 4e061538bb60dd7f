"""Replicas as detached processes, with the shim of the local backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from archipelago_nohup.backend import Options
from executors import options as declared
from executors.base import ExecutorConfig, JobRequest, Problem, ReplicaHandle, ReplicaSpec
from executors.local.executor import LocalProcessExecutor

OWN = ("queue", "priority")


class NohupExecutor(LocalProcessExecutor):
    backend = "nohup"

    def __init__(self, config: ExecutorConfig) -> None:
        declared.read(Options, config.options)
        super().__init__(dataclasses.replace(config, options=_without_own(config.options)))

    def start_all(self, jobs: Sequence[JobRequest]) -> list[ReplicaHandle]:
        plain = [dataclasses.replace(job, spec=_plain(job.spec)) for job in jobs]
        return super().start_all(plain)

    def preflight(self, spec: ReplicaSpec, count: int) -> list[Problem]:
        return super().preflight(_plain(spec), count)

    def _handle(self, launch_key: str) -> ReplicaHandle:
        return dataclasses.replace(super()._handle(launch_key), data={"key": launch_key})


def _plain(spec: ReplicaSpec) -> ReplicaSpec:
    declared.read(Options, {}, spec.options)
    return dataclasses.replace(spec, options=_without_own(spec.options))


def _without_own(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in OWN}
