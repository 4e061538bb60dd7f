"""Tags of runs: they group runs in lists, and budgets limit what runs with a tag spend."""

from __future__ import annotations

from collections.abc import Iterable

from runs.exceptions import ActionRefused

TAG_LENGTH = 40
TAGS = 20


def parse_tags(tags: Iterable[str]) -> list[str]:
    """Distinct tags in the given order. Tags have no space or comma, which queries split at.

    Raises :class:`ActionRefused` for invalid tags, and for too many.
    """
    tags_in_order = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    for tag in tags_in_order:
        is_invalid = any(sign.isspace() or not sign.isprintable() or sign in ",:" for sign in tag)
        if is_invalid or len(tag) > TAG_LENGTH:
            raise ActionRefused(
                f"expected tags of 1 to {TAG_LENGTH} characters without space, comma and colon, "
                f"found {tag[:TAG_LENGTH]!r}"
            )
    if len(tags_in_order) > TAGS:
        raise ActionRefused(f"expected at most {TAGS} tags, found {len(tags_in_order)}")
    return tags_in_order
