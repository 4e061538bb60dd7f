"""Errors of forms begin with a capital letter, whichever layer of the domain wrote them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.template import Context, Template
from django.utils.html import format_html

from dashboard.templatetags.ui import _BEGINNING, sentence

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = REPOSITORY / "templates"
ERRORS = re.compile(r"\{% for error in [\w.]+ %\}(.*?)\{% endfor %\}", re.DOTALL)


def test_every_template_capitalises_errors_of_forms() -> None:
    shown = 0
    for path in TEMPLATES.rglob("*.html"):
        text = path.read_text()
        for block in ERRORS.findall(text):
            shown += 1
            assert "{{ error|sentence }}" in block, path
        assert text.count(".non_field_errors") <= 2, path
    assert shown >= 3


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("expected a number, found 'x'", "Expected a number, found 'x'"),
        ("stat:x: expected one of state", "stat:x: expected one of state"),
        ("outer_lr has no effect", "outer_lr has no effect"),
        ("modal cannot be used as it is set up", "modal cannot be used as it is set up"),
        ("codec has no effect", "codec has no effect"),
        ("localhost has no address", "localhost has no address"),
        ("a run can have 8 evaluations", "A run can have 8 evaluations"),
        ("'paper' has been deleted meanwhile", "'paper' has been deleted meanwhile"),
        ("", ""),
    ],
)
def test_names_and_terms_stay_as_they_are(message: str, shown: str) -> None:
    assert sentence(message) == shown


def test_the_submit_form_has_the_same_rule() -> None:
    script = (REPOSITORY / "static/js/lib/forms.js").read_text()
    assert f"/{_BEGINNING.pattern}/" in script


def test_escaped_messages_are_not_escaped_again() -> None:
    template = Template("{% load ui %}{{ message|sentence }} {{ plain|sentence }}")
    context = Context({"message": format_html("expected {}", "<"), "plain": "expected <"})
    assert template.render(context) == "Expected &lt; Expected &lt;"
