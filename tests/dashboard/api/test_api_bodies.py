"""Request bodies: limited in size, parsed after the role check, in linear time."""

from __future__ import annotations

import contextlib
import itertools
import random
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from dashboard.api import auth, document_text, parser
from dashboard.api.site import api

FOR_READERS = {
    *("/planner", "/views", "/views/{int:view_id}", "/boards", "/boards/{int:board_id}"),
    *("/run-views", "/run-views/{int:view_id}"),
    *("/alerts/read", "/tokens", "/tokens/{int:token_id}"),
}
"""Operations that viewers can call with a body; their bodies are small JSON."""


CHECKED = (auth.OPERATORS, auth.ADMINISTRATORS)
"""Authentication that checks the role before the body is parsed."""


def send(token: str, path: str, body: str, content_type: str = parser.TOML) -> Any:
    return Client().post(
        f"/api{path}", body, content_type=content_type, headers={"Authorization": f"Bearer {token}"}
    )


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Bodies that reach the TOML parser."""
    seen: list[str] = []

    def loads(text: str) -> Any:
        seen.append(text)
        return tomllib.loads(text) if len(text) < 5000 else {}

    monkeypatch.setattr(document_text.tomllib, "loads", loads)  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize("path", ["/runs", "/plan"])
def test_the_body_of_a_viewer_is_not_parsed(
    token_of: Callable[..., str], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = parsed(monkeypatch)
    response = send(token_of("vera", "viewer"), path, "name = 'x'")
    assert response.status_code == 403
    assert "expected an operator" in response.json()["detail"]
    assert seen == []


def test_the_body_of_a_read_only_token_is_not_parsed(
    token_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = parsed(monkeypatch)
    response = send(token_of("olga", "operator", "read"), "/plan", "name = 'x'")
    assert response.status_code == 403
    assert seen == []


def test_write_operations_check_the_role_before_parsing_the_body() -> None:
    result = {}
    for _, router in api._routers:
        for path, view in router.path_operations.items():
            for operation in view.operations:
                if set(operation.methods) - {"GET"}:
                    result[path] = operation.auth_callbacks
    late = {path for path, callbacks in result.items() if callbacks not in CHECKED}
    assert late == FOR_READERS
    assert len(result) > 10


@pytest.mark.parametrize(
    "body",
    [
        "a." * 10_000 + "a = 1",
        "[" + "a." * 10_000 + "a]",
        "x = {" + "a." * 10_000 + "a = 1}",
        '"a" . ' * 5_000 + '"a" = 1',
        "x = {y = '''q'''', " + "a." * 5_000 + "a = 1}",
        'x = {y = """q"""", ' + "a." * 5_000 + "a = 1}",
        'x = {y = """q\\"""", ' + "a." * 5_000 + "a = 1}",
    ],
)
def test_dotted_keys_with_many_parts_are_rejected_before_parsing(
    token_of: Callable[..., str], body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = parsed(monkeypatch)
    response = send(token_of("olga", "operator"), "/plan", body)
    if seen:  # otherwise an unterminated string without a key
        with pytest.raises(tomllib.TOMLDecodeError):
            tomllib.loads(body)
        return
    assert response.status_code == 422, response.content
    assert "at most 20 parts" in response.json()["detail"]


def test_dots_in_strings_and_comments_are_ignored() -> None:
    dots = "a." * 50 + "a"
    texts = [
        f'x = "{dots}"',
        f"x = '{dots}'",
        f'x = """{dots}"""',
        f"x = '''{dots}\n'''''",
        f"# {dots}",
        f'x = "\\"{dots}" # {dots}',
        f"x = [1.5, '{dots}', 2.5]",
    ]
    for text in texts:
        document_text.check_toml_keys(text)
        tomllib.loads(text)


def test_every_valid_toml_document_reveals_its_dotted_keys() -> None:
    """The scan finds every key that the parser finds, for any arrangement of strings and
    comments."""
    pieces = [
        '"',
        "'",
        '"""',
        "'''",
        '""',
        "''",
        "\\",
        "#",
        "\n",
        "=",
        "x",
        ".",
        "{",
        "}",
        ",",
        " ",
        "x = ",
        "a.a.a.a = 1",
        "[",
        "]",
        "1",
        "y",
    ]
    chance = random.Random(7)
    long = ".".join("k" * 30)
    accepted = 0
    for _ in range(30_000):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 9)))
        at = chance.randint(0, len(text))
        text = f"{text[:at]}{long} = 1{text[at:]}"
        try:
            result = tomllib.loads(text)
        except ValueError:
            continue
        if _deepest(result) >= 30:
            accepted += 1
            with pytest.raises(document_text.Unfit):
                document_text.check_toml_keys(text)
    assert accepted > 50


def _deepest(value: Any) -> int:
    return 1 + max(map(_deepest, value.values()), default=0) if isinstance(value, dict) else 0


def test_the_key_scan_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a regular expression cannot be counted. A quadratic scan of 200 KB would take
    minutes, so the test would time out."""
    for piece in (" ", "a", "a.", '"', "'", '"\\', '"""\\', "#", "\t.", '""" ', "'''' "):
        text = "".join(itertools.islice(itertools.cycle(piece), 200_000))
        with contextlib.suppress(document_text.Unfit):
            document_text.check_toml_keys(text)


@pytest.mark.parametrize(
    ("content_type", "limit"),
    [
        (parser.TOML, document_text.TEXT_BYTES),
        (parser.YAML, document_text.TEXT_BYTES),
        ("application/json", document_text.JSON_BYTES),
    ],
)
def test_a_body_over_the_limit_is_a_413(
    token_of: Callable[..., str], content_type: str, limit: int
) -> None:
    token = token_of("olga", "operator")
    filler = "#" if content_type == parser.TOML else " "
    response = send(token, "/plan", filler * (limit + 1), content_type)
    assert response.status_code == 413
    assert f"expected at most {limit:,} bytes" in response.json()["detail"]
