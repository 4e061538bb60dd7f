"""Watch a run's page during a fault, until it is back to normal."""

from __future__ import annotations

import contextlib
import html
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LOOK_EVERY_S = 1.0

Fetch = Callable[[str], tuple[int, str]]
"""Status and body of a path; status 0 for no answer."""


@dataclass(frozen=True, kw_only=True)
class Glance:
    """The run page, its state and ``/readyz`` at one moment."""

    page: int
    """HTTP status, 0 for no answer."""
    state: str
    reason: str
    rounds: int
    banners: tuple[str, ...]
    not_ready: tuple[str, ...]
    """Parts of ``/readyz`` that are not ``ok``."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing calls for attention."""
        ordinary = self.state in ("running", "succeeded", "provisioning")
        return self.page == 200 and ordinary and not self.banners and not self.not_ready

    @property
    def text(self) -> str:
        parts = [] if self.page == 200 else [f"page {self.page or 'without an answer'}"]
        parts.append(f"{self.state}: {self.reason}" if self.reason else self.state)
        parts += [f"banner: {banner}" for banner in self.banners]
        parts += [f"readyz: {part}" for part in self.not_ready]
        return "; ".join(parts)


def banners_of(page: str) -> tuple[str, ...]:
    """The texts of the banners that are not hidden."""
    every = re.findall(r'class="banner[^"]*"([^>]*)>(.*?)</div>', page, re.DOTALL)
    found = [text for attributes, text in every if not attributes.rstrip().endswith(" hidden")]
    texts = [" ".join(html.unescape(re.sub(r"<[^>]+>", " ", one)).split()) for one in found]
    return tuple(text for text in texts if text and "JavaScript" not in text)


def glance(fetch: Fetch, run: str) -> Glance:
    status, page = fetch(f"/runs/{run}/")
    header: dict[str, Any] = {}
    ready: dict[str, Any] = {"readyz": "no answer"}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(fetch(f"/runs/{run}/snapshot.json")[1])["run"]
    with contextlib.suppress(ValueError):
        ready = json.loads(fetch("/readyz")[1])
    return Glance(
        page=status,
        state=header.get("state", "no state"),
        reason=header.get("state_reason") or "",
        rounds=header.get("committed_rounds", 0),
        banners=banners_of(page) if status == 200 else (),
        not_ready=tuple(f"{k} {v}" for k, v in ready.items() if v != "ok" and k != "ready"),
    )


@dataclass
class PageWatch:
    """Looks at the page of one run from time to time."""

    fetch: Fetch
    run: str
    seen: list[tuple[float, Glance]] = field(default_factory=list)
    """New texts of the page, with the seconds since the start of the watch."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def look(self) -> Glance:
        at = time.monotonic() - self._began
        found = glance(self.fetch, self.run)
        if not self.seen or _kind(self.seen[-1][1]) != _kind(found):
            self.seen.append((at, found))
        return found

    def during(self, seconds: float) -> None:
        """Look for so long, at least once."""
        while True:
            self.look()
            left = self._began + seconds - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(LOOK_EVERY_S, left))

    def until_normal(self, *, patience_s: float) -> float | None:
        """Seconds until nothing calls for attention and a new round is shown, or the run has
        succeeded. None where that did not come."""
        began = time.monotonic()
        before = self.look().rounds
        while time.monotonic() - began < patience_s:
            found = self.look()
            moves = found.rounds > before or found.state == "succeeded"
            if found.is_quiet and moves:
                return time.monotonic() - began
            time.sleep(LOOK_EVERY_S / 2)
        return None


def _kind(one: Glance) -> tuple[object, ...]:
    """What makes a glance a new one: its words without their numbers."""
    words = (one.state, one.reason, *one.banners, *one.not_ready)
    return (one.page, *(re.sub(r"\d+", "0", word) for word in words))
