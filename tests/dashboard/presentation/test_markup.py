"""HTML is filled like Django's ``format_html`` does."""

from __future__ import annotations

import pytest
from django.utils.html import format_html
from django.utils.safestring import SafeString

from dashboard.presentation.markup import fill


@pytest.mark.parametrize(
    "value", ["<b>\"x\" & 'y'</b>", SafeString("<b>x</b>"), 12, 1.5, None, True, "{}", ""]
)
def test_values_are_escaped_unless_they_are_html(value: object) -> None:
    filled = fill('<a title="{0}" id="{id}">{0}</a>', value, id=value)
    assert filled == format_html('<a title="{0}" id="{id}">{0}</a>', value, id=value)
    assert isinstance(filled, SafeString)
