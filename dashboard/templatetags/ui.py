"""Template tags: icons, state badges, and numbers in the format of
:mod:`dashboard.presentation.formats`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from django import template
from django.contrib.auth.models import User
from django.db import DatabaseError
from django.template import Context
from django.templatetags.static import static
from django.urls import NoReverseMatch, get_script_prefix, get_urlconf, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from dashboard import access, assets
from dashboard import theme as themes
from dashboard.presentation import badges, failure_texts, formats, times
from runs.json_values import texts
from runs.queries import alert_inbox
from runs.queries.failures import Failure
from runs.queries.search import quoted

register = template.Library()


def _number(show: Callable[[float | None], str]) -> Callable[[object], str]:
    """A filter that shows a value as unknown if it is not a number."""
    return lambda value: show(value if isinstance(value, int | float) else None)


for _show in (
    formats.count,
    formats.size,
    formats.loss,
    formats.duration,
    formats.percent,
    formats.money,
):
    register.filter(_show.__name__, _number(_show))
register.filter("exact", formats.exact)
register.filter("spent", formats.spent)
register.filter("texts", texts)
register.filter("quoted", quoted)
register.simple_tag(access.role_of, name="role")
for _tag in (badges.icon, badges.state, times.moment, times.clock, times.left):
    register.simple_tag(_tag)

register.filter(times.age)

NAVIGATION = (
    ("Runs", "runs", ("run", "runs", "replica", "pool")),
    ("Sweeps", "sweeps", ("sweep", "sweeps")),
    ("Fleet", "fleet", ("fleet",)),
    ("Compare", "compare", ("compare",)),
    ("Boards", "boards", ("board", "boards")),
    ("Spend", "spend", ("spend",)),
    ("Planner", "planner", ("planner",)),
)
"""Label and URL name of the pages in the top bar, and the first words of the names below them."""


@register.simple_tag(takes_context=True)
def navigation(context: Context) -> SafeString:
    """The links of the top bar, of which one is the current page or above it."""
    match = getattr(context.get("request"), "resolver_match", None)
    return _navigation((match.url_name or "") if match else "", get_urlconf(), get_script_prefix())


@lru_cache(maxsize=512)
def _navigation(at: str, *_where: object) -> SafeString:
    """The links on the page with a URL name. Addresses depend on the URLs and their prefix."""
    entries = []
    for label, name, words in NAVIGATION:
        try:
            url = reverse(name)
        except NoReverseMatch:
            continue
        current = "page" if at == name else "true" if at.split("-")[0] in words else ""
        mark = format_html(' aria-current="{}"', current) if current else ""
        entries.append((url, mark, label))
    return format_html_join("", '<a href="{}"{}>{}</a>', entries)


@register.simple_tag
def unread_alerts(user: User) -> int:
    """The number beside the bell, of a user with a role. One query."""
    try:
        return alert_inbox.unread_count(user)
    except DatabaseError:  # a page about trouble of the database
        return 0


@register.simple_block_tag
def script(content: str) -> SafeString:
    """Load the script of the page that the block names, by default ``base``: the bundle with its
    chunks, or with ``ARCHIPELAGO_DEBUG`` the source modules."""
    return _script_tags(content.strip() or "base")


@lru_cache(maxsize=64)
def _script_tags(page: str) -> SafeString:
    entry, *chunks = assets.scripts_of(page)
    preloads = format_html_join(
        "\n  ", '<link rel="modulepreload" href="{}">', ((static(path),) for path in chunks)
    )
    return format_html('<script type="module" src="{}"></script>{}', static(entry), preloads)


@register.simple_tag(takes_context=True)
def theme(context: Context) -> SafeString:
    """Attribute of the root element for a chosen theme; none for that of the system."""
    chosen = themes.chosen(context.get("request"))
    if chosen is themes.Theme.SYSTEM:
        return SafeString("")
    return format_html(' data-theme="{}"', chosen)


_BEGINNING = re.compile(r"^(expected|enter|an?|the|its|another|no|not|only|cancel|leave) ")
CAUSES = {
    "done": ("succeeded", "succeeded"),
    "error": ("failed", "failed"),
    "out_of_memory": ("failed", "failed"),
    "preempted": ("evicted", "warning"),
    "deadline": ("late", "warning"),
    "cancelled": ("cancelled", "queued"),
    "lost": ("lost", "failed"),
    "refused": ("refused", "failed"),
}
"""Exit cause of an attempt -> (icon, tone)."""


@register.filter
def cause_word(name: str) -> str:
    return name.replace("_", " ")


@register.filter(is_safe=True)
def sentence(message: object) -> str:
    """An error with a capital at its beginning, if it begins with a word that is no name: backends,
    settings and files stay as they are. The domain writes errors for the end of a line:
    ``outer_lr: expected 0 or more``."""
    text = str(message)
    return text[:1].upper() + text[1:] if _BEGINNING.match(text) else text


@register.filter
def explanation(failure: Failure) -> str:
    return failure_texts.explanation(
        replica=failure.replica, cause=failure.cause, exit_code=failure.exit_code
    )


@register.simple_tag
def cause(name: str) -> SafeString:
    symbol, tone = CAUSES.get(name, ("suspect", "queued"))
    return format_html(
        '<span class="state state-bare" data-tone="{}">{}<span>{}</span></span>',
        tone,
        badges.icon(symbol),
        cause_word(name),
    )
