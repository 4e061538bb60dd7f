"""The API reference is complete, and its examples are valid."""

from __future__ import annotations

import shlex

import pytest
from django.test import Client
from django.urls import reverse

from archipelago.cli import parser
from dashboard.presentation.api_commands import COMMANDS
from dashboard.presentation.api_reference import Operation
from dashboard.views.api_docs import reference
from tests.browser import seed


@pytest.fixture(scope="module")
def operations() -> list[Operation]:
    return [operation for section in reference().sections for operation in section.operations]


@pytest.mark.django_db
def test_the_page_lists_every_operation(client: Client, operations: list[Operation]) -> None:
    client.force_login(seed.user("vera", "viewer"))
    page = client.get(reverse("api-docs")).content.decode()
    assert len(operations) > 70
    for operation in operations:
        assert f'id="{operation.id}"' in page, operation
    assert "<script>" not in page and "style=" not in page


def test_ids_are_unique(operations: list[Operation]) -> None:
    assert len({operation.id for operation in operations}) == len(operations)


def test_every_operation_is_described(operations: list[Operation]) -> None:
    for found in operations:
        assert found.summary and found.answers, found.id
        assert found.curl.startswith("curl ") and "{" not in found.curl.partition(" -d ")[0]
        assert "$SERVER/api/" in found.curl
        for field in (*found.parameters, *found.body):
            assert field.name and field.type, found.id


def test_a_body_lists_nested_fields_with_bounds_and_defaults(operations: list[Operation]) -> None:
    submit = next(o for o in operations if (o.method, o.path) == ("POST", "/api/runs"))
    fields = {field.name: field for field in submit.body}
    assert fields["name"].required and "at most 80 characters" in fields["name"].bounds
    assert fields["pools[].count"].default == "1"
    assert "pools[].backend" in fields and "settings.sync_every" in fields


def test_parameters_have_their_place_and_bounds(operations: list[Operation]) -> None:
    fleet = next(o for o in operations if o.path == "/api/fleet")
    limit = next(field for field in fleet.parameters if field.name == "limit")
    assert (limit.where, limit.default) == ("query", "50")
    assert limit.bounds == "1 or more; at most 500"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_parses(name: str) -> None:
    words = shlex.split(COMMANDS[name])
    assert words[0] == "archipelago"
    parser().parse_args(words[1:])


def test_commands_belong_to_operations(operations: list[Operation]) -> None:
    with_command = {operation.command for operation in operations} - {""}
    assert with_command == set(COMMANDS.values())
