"""Refusals of the emulated Modal, with the real client. The executor's tests cover the rest."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import modal
import modal.exception
import pytest
from modal_proto import api_pb2

from tests.emulators.modal import ModalServer

pytestmark = pytest.mark.processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ModalServer]:
    with ModalServer(tmp_path) as started:
        yield started


@pytest.fixture
def client(server: ModalServer) -> Iterator[modal.Client]:
    with modal.Client(server.url, api_pb2.CLIENT_TYPE_CLIENT, server.token) as opened:
        yield opened


@pytest.fixture
def app(client: modal.Client) -> modal.App:
    return modal.App.lookup("tests", client=client, create_if_missing=True)


def post(server: ModalServer, path: str, body: dict[str, object]) -> tuple[int, str]:
    request = urllib.request.Request(server.url + path, data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_an_unknown_token_is_refused(server: ModalServer) -> None:
    for token in (("ak-x", "as-x"), (server.token[0], "as-x")):
        with (
            modal.Client(server.url, api_pb2.CLIENT_TYPE_CLIENT, token) as stranger,
            pytest.raises(modal.exception.AuthError, match="Token validation failed"),
        ):
            stranger.hello()


@pytest.mark.parametrize("gpu", [None, "H100"])
def test_a_name_belongs_to_one_living_sandbox(
    client: modal.Client, app: modal.App, gpu: str | None
) -> None:
    first = modal.Sandbox.create("sleep", "60", app=app, client=client, name="one", gpu=gpu)
    with pytest.raises(modal.exception.AlreadyExistsError, match="already exists"):
        modal.Sandbox.create("sleep", "60", app=app, client=client, name="one", gpu=gpu)
    result = modal.Sandbox.from_name("tests", "one", client=client)
    assert result.object_id == first.object_id
    assert first.terminate(wait=True) == 137
    second = modal.Sandbox.create("true", app=app, client=client, name="one", gpu=gpu)
    assert second.object_id != first.object_id
    second.wait()


def test_ended_sandboxes_of_only_one_kind_are_found_by_name(
    client: modal.Client, app: modal.App
) -> None:
    for name, gpu in (("cpu", None), ("gpu", "T4")):
        modal.Sandbox.create("true", app=app, client=client, name=name, gpu=gpu).wait()
        with pytest.raises(modal.exception.NotFoundError):
            modal.Sandbox.from_name("tests", name, client=client)
    modal.Sandbox.from_name("tests", "cpu", client=client, include_terminated=True)
    with pytest.raises(modal.exception.NotFoundError):
        modal.Sandbox.from_name("tests", "gpu", client=client, include_terminated=True)


def test_an_unknown_path_is_an_error(client: modal.Client) -> None:
    with pytest.raises(modal.exception.NotFoundError, match="App 'unknown' not found"):
        modal.App.lookup("unknown", client=client)
    for sandbox_id in (f"sb-{'x' * 22}", "sb-v2-unknown"):
        with pytest.raises(modal.exception.NotFoundError, match="not found"):
            modal.Sandbox.from_id(sandbox_id, client=client)


def test_faults_are_injected_over_http(
    server: ModalServer, client: modal.Client, app: modal.App
) -> None:
    assert post(server, "/_emulator/refuse_quota", {"message": "no more"})[0] == 200
    with pytest.raises(modal.exception.ResourceExhaustedError, match="no more"):
        modal.Sandbox.create("true", app=app, client=client)
    assert post(server, "/_emulator/refuse_quota", {"message": None})[0] == 200
    made = modal.Sandbox.create("sleep", "60", app=app, client=client)
    assert post(server, "/_emulator/oom", {"sandbox_id": made.object_id})[0] == 200
    made.wait()
    assert made.returncode == 137


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/_emulator/explode", {}),
        ("/oom", {}),
        ("/_emulator/oom", {"job": "x"}),
        ("/_emulator/oom", {"sandbox_id": "unknown"}),
        ("/_emulator/stop", {}),
    ],
)
def test_an_invalid_fault_is_named(server: ModalServer, path: str, body: dict[str, object]) -> None:
    status, text = post(server, path, body)
    assert status == 404 and json.loads(text)["error"]
