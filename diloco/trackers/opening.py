"""Kinds of trackers: what a user enters for each, and the tracker that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from diloco.trackers.base import Open, Tracker
from diloco.trackers.http import default_open
from diloco.trackers.mlflow import MLflowTracker
from diloco.trackers.tensorboard import TensorBoardTracker
from diloco.trackers.trackio import TrackioTracker
from diloco.trackers.wandb import WandbTracker


@dataclass(frozen=True, kw_only=True)
class TrackerKind:
    """A kind of tracker, as forms show it.

    Attributes:
        server: label of the address or folder; '' if the kind has none.
        project: label of the project or experiment; '' if the kind has none.
        default_server: the address that an empty one means; '' if an address is needed.
        secrets: names of the secrets that it uses; all are optional.
        is_slow: each batch starts a process.
    """

    name: str
    label: str
    server: str = ""
    project: str = ""
    default_server: str = ""
    secrets: tuple[str, ...] = ()
    is_slow: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        TrackerKind(name="tensorboard", label="TensorBoard", server="Folder on the server"),
        TrackerKind(
            name="mlflow",
            label="MLflow",
            server="Tracking server",
            project="Experiment",
            secrets=(
                "MLFLOW_TRACKING_TOKEN",
                "MLFLOW_TRACKING_USERNAME",
                "MLFLOW_TRACKING_PASSWORD",
            ),
        ),
        TrackerKind(
            name="trackio",
            label="trackio",
            server="Server",
            project="Project",
            secrets=("TRACKIO_WRITE_TOKEN", "HF_TOKEN"),
        ),
        TrackerKind(
            name="wandb",
            label="Weights & Biases",
            server="Server",
            default_server="https://api.wandb.ai",
            project="Project",
            secrets=("WANDB_API_KEY",),
            is_slow=True,
        ),
        TrackerKind(
            name="wandb-offline",
            label="Weights & Biases, offline",
            project="Project",
            is_slow=True,
        ),
    )
}


class InvalidDestination(ValueError):
    """A value of a destination is refused.

    Attributes:
        field: ``server`` or ``project``.
        message: the reason and the expected value, without the label of the field.
    """

    def __init__(self, field: str, message: str, *, label: str) -> None:
        super().__init__(f"{label}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a run is mirrored to. Raises :class:`InvalidDestination`, and ``ValueError`` for an
    unknown kind."""

    kind: str
    server: str = ""
    project: str = ""

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind)
        if kind is None:
            raise ValueError(f"expected a kind of {', '.join(KINDS)}, found {self.kind!r}")
        server = self.server or kind.default_server
        for name, label, value in (
            ("server", kind.server, server),
            ("project", kind.project, self.project),
        ):
            if label and not value.strip():
                message = f"enter a value; {kind.label} needs it"
                raise InvalidDestination(name, message, label=label)
            if not label and value:
                message = f"{kind.label} has no such field, found {value[:80]!r}"
                raise InvalidDestination(name, message, label=name)
        if kind.name == "tensorboard" and not Path(self.server).is_absolute():
            raise self._refused(f"expected an absolute path, found {self.server[:80]!r}")
        try:
            parts = urlsplit(server)
        except ValueError as error:  # such as http://[
            raise self._refused(f"{error}, found {self.server[:80]!r}") from None
        if self.has_address and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise self._refused(
                "expected an address such as https://tracker.example.com, found "
                f"{self.server[:80]!r}"
            )
        if parts.username or parts.password or parts.query:
            raise self._refused("expected an address without secrets")

    def _refused(self, message: str) -> InvalidDestination:
        """The error of the server's address or folder."""
        return InvalidDestination("server", message, label=KINDS[self.kind].server)

    @property
    def has_address(self) -> bool:
        """Whether secrets and rows are sent to a server."""
        return bool(KINDS[self.kind].server) and self.kind != "tensorboard"

    @property
    def address(self) -> str:
        """The server that secrets and rows are sent to; '' if there is none."""
        if not self.has_address:
            return ""
        return (self.server.strip() or KINDS[self.kind].default_server).rstrip("/")


def open_tracker(
    destination: Destination,
    *,
    folder: Path,
    secrets: Mapping[str, str] | None = None,
    open: Open = default_open,
) -> Tracker:
    """The tracker of a destination. Nothing is written or connected yet.

    Args:
        folder: for files of trackers that need some; below it, each run has its own.
        secrets: the values of :attr:`TrackerKind.secrets` that are known.
        open: sends HTTP requests.
    """
    server, project = destination.server, destination.project
    match destination.kind:
        case "tensorboard":
            return TensorBoardTracker(server)
        case "mlflow":
            return MLflowTracker(server, project, secrets=secrets, open=open)
        case "trackio":
            return TrackioTracker(server, project, secrets=secrets, open=open)
        case kind:
            return WandbTracker(
                project,
                folder=folder,
                server=destination.address,
                offline=kind == "wandb-offline",
                secrets=secrets,
            )
