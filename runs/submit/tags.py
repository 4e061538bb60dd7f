"""Tags of runs: they group runs in lists, and budgets limit what runs with a tag spend."""

from __future__ import annotations

from collections.abc import Iterable

from runs.exceptions import ActionRefused

TAG_LENGTH = 40
TAGS = 20
EXPECTED = f"expected tags of 1 to {TAG_LENGTH} characters without space, comma and colon"


def is_tag(text: str) -> bool:
    """Whether a text without white space around it can be a tag."""
    signs = all(sign.isprintable() and not sign.isspace() and sign not in ",:" for sign in text)
    return signs and 1 <= len(text) <= TAG_LENGTH


def parse_tags(tags: Iterable[str]) -> list[str]:
    """Distinct tags in the given order. Tags have no space or comma, which queries split at.

    Raises :class:`ActionRefused` for invalid tags, and for too many.
    """
    tags_in_order = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    for tag in tags_in_order:
        if not is_tag(tag):
            raise ActionRefused(f"{EXPECTED}, found {tag[:TAG_LENGTH]!r}")
    if len(tags_in_order) > TAGS:
        raise ActionRefused(f"expected at most {TAGS} tags, found {len(tags_in_order)}")
    return tags_in_order
