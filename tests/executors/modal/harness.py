"""Modal: the real SDK against the emulated control plane."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from unittest import mock

from modal._grpc_client import _DEFAULT_RETRY

from executors.base import ReplicaHandle
from executors.modal.executor import ModalExecutor
from tests.emulators.interruptions import Interruption
from tests.emulators.modal import ModalServer
from tests.executors.harnesses import LIMIT_S, config


class ModalHarness:
    backend = "modal"
    missing: Mapping[str, str] = {}
    wrong_credentials: ClassVar[dict[str, str]] = {
        "MODAL_TOKEN_ID": "ak-nobodys7Hq2",
        "MODAL_TOKEN_SECRET": "as-nobodysXw81",
    }

    def __init__(self, folder: Path) -> None:
        self.server = ModalServer(folder)
        self._is_interrupted = False
        # The SDK repeats a request three times, within 0.7 s.
        self._prompt = mock.patch.dict(vars(_DEFAULT_RETRY), base_delay=0.005)

    def __enter__(self) -> Self:
        self.server.__enter__()
        self._prompt.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._prompt.stop()
        self.server.__exit__(kind, error, trace)

    def executor(self, **options: Any) -> ModalExecutor:
        token_id, token_secret = self.server.token
        token = {"MODAL_TOKEN_ID": token_id, "MODAL_TOKEN_SECRET": token_secret}
        credentials = {"MODAL_SERVER_URL": self.server.url, **options.pop("credentials", token)}
        ours = {"log_poll_s": 0.05, "api_timeout_s": 2.0 if self._is_interrupted else LIMIT_S}
        return ModalExecutor(config(credentials=credentials, **{**ours, **options}))

    def impatient(self) -> ModalExecutor:
        return self.executor(api_timeout_s=0.3)

    def description(self, handle: ReplicaHandle) -> str:
        made = self.server.api.sandboxes[handle.data["id"]]
        return f"{made.definition} {made.tags}"

    def preempt(self, handle: ReplicaHandle) -> None:
        self.server.preempt(handle.data["id"])

    def oom(self, handle: ReplicaHandle) -> None:
        self.server.oom(handle.data["id"])

    def lose(self, handle: ReplicaHandle) -> None:
        self.server.lose(handle.data["id"])

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server.start()

    def slow(self, seconds: float) -> None:
        self.server.slow(seconds)

    def refuse_quota(self, message: str | None) -> None:
        self.server.refuse_quota(message)

    def interrupt(self, at: int, how: Interruption) -> None:
        self._is_interrupted = True  # the SDK retries until the timeout
        self.server.faults.interruptions.interrupt(at, how)

    def restore(self) -> int:
        self._is_interrupted = False
        return self.server.faults.interruptions.restore()

    def incomplete(self) -> list[str]:
        """Always empty: a Sandbox is created with its Secret."""
        return []

    def left_behind(self) -> list[str]:
        """Always empty: unnamed Secrets belong to the App and are deleted with it."""
        return []

    def requests(self) -> int:
        return self.server.requests


HARNESS = ModalHarness
