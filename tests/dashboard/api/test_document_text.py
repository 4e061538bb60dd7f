"""The text of a document: three formats with the same values, and bounded parsing."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from dashboard.api import document_text
from dashboard.api.document_text import DEEPEST, Unfit, format_of, parse

TOML = """
# A comment
name = "x"
[settings]
inner_lr = 3e-4
dylu = "on"
[[pools]]
count = 2
"""
YAML = """
# A comment
name: x
settings:
  inner_lr: 3e-4
  dylu: on
pools:
  - count: 2
"""
VALUE: dict[str, Any] = {
    "name": "x",
    "settings": {"inner_lr": 3e-4, "dylu": "on"},
    "pools": [{"count": 2}],
}


@pytest.mark.parametrize(
    ("format", "text"), [("json", json.dumps(VALUE)), ("toml", TOML), ("yaml", YAML)]
)
def test_all_formats_have_the_same_values(format: Any, text: str) -> None:
    assert format_of(text) == format
    assert parse(text, format) == VALUE


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: ", None),
        ("a: ~", None),
        ("a: no", "no"),
        ("a: 1:30", "1:30"),
        ("a: 0o17", "0o17"),
        ("a: -4", -4),
        ("a: 1e3", 1000.0),
        ("a: .5", 0.5),
        ("a: 2026-01-31", "2026-01-31"),
        ("a: 'true'", "true"),
        ("a: true", True),
        ("a: {<<: {b: 1}}", {"<<": {"b": 1}}),
    ],
)
def test_scalars_of_yaml_have_the_types_of_the_core_schema(text: str, value: Any) -> None:
    assert parse(text, "yaml") == {"a": value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1", "no anchor"),
        ("a: *x", "no alias"),
        ("a: !!python/object/apply:os.system [ls]", "no tag"),
        ("a: 1\na: 2", "'a' once"),
        ("1: 2", "names that are text"),
        ("[1]: 2", "names that are text"),
        ("a: .inf", "finite numbers"),
        ("a: .nan", "finite numbers"),
        (f"a: {'[' * 30_000}", f"at most {DEEPEST} levels"),
        ("\n".join(" " * n + "a:" for n in range(200)), f"at most {DEEPEST} levels"),
        ("a: 99999999999999999999", "2^53"),
    ],
)
def test_a_value_of_yaml_that_no_document_contains_is_refused(text: str, expected: str) -> None:
    with pytest.raises(Unfit, match=expected.replace("^", r"\^")):
        parse(text, "yaml")


@pytest.mark.parametrize(
    ("format", "text"), [("json", '{"a": {"b": 1, "b": 2}}'), ("yaml", "a: {b: 1, b: 2}")]
)
def test_a_repeated_name_is_refused(format: Any, text: str) -> None:
    with pytest.raises(Unfit, match="expected 'b' once, found it twice"):
        parse(text, format)


@pytest.mark.parametrize(
    "text", ["a: [", "a: b: c", "\ta: 1", "--- a\n--- b", "a: \x01", r'a: "\UFFFFFFFF"']
)
def test_invalid_yaml_is_an_error_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(text, "yaml")


def test_the_parser_of_yaml_reads_each_character_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts, not seconds: twice the text takes at most about twice the steps."""
    steps = 0
    forward = document_text._Loader.forward

    def counted(self: Any, length: int = 1) -> None:
        nonlocal steps
        steps += length
        forward(self, length)

    monkeypatch.setattr(document_text._Loader, "forward", counted)
    used = []
    for size in (2000, 4000):
        for piece in ("a, ", '"a": ', "- ", "? ", "a:\n", "'", "# ", "|", "{a: 1}, "):
            with contextlib.suppress(ValueError):
                parse("x: [" + piece * (size // len(piece)), "yaml")
        used.append(steps)
        steps = 0
    assert used[1] <= 2.5 * used[0]
