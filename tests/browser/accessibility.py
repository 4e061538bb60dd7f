"""Accessibility problems that axe-core finds on a page.

Contrast takes two thirds of axe's time. It depends on colors, fonts and the elements behind a text,
so one text of those that are equal in them is examined: :class:`Contrast`.
"""

from __future__ import annotations

from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

CONTRAST = "['color-contrast']"
WITHOUT_CONTRAST = "rules: {'color-contrast': {enabled: false}}"
"""All rules that axe examines by default, those of best practices too, except contrast."""
BETWEEN_PARTS = "runOnly: ['heading-order', 'landmark-unique']"
"""The rules that compare a part of a page with the other parts."""

CHOOSE = """
([selector, known, classes]) => {
    const own = new Map(), seen = new Set(known), news = [];
    const hash = (text) => {
        let high = 0xdeadbeef, low = 0x41c6ce57;
        for (let i = 0; i < text.length; i++) {
            const code = text.charCodeAt(i);
            high = Math.imul(high ^ code, 2654435761);
            low = Math.imul(low ^ code, 1597334677);
        }
        return 4294967296 * (2097151 & high) + (low >>> 0);
    };
    const behind = (element) => { // what the element and those around it paint behind a text
        if (!element) return 0;
        if (!own.has(element)) {
            const style = getComputedStyle(element);
            const paint = [style.backgroundColor, style.backgroundImage, style.opacity].join("|");
            const around = behind(element.parentElement);
            const place = classes
                ? [element.localName, element.getAttribute("class"), style.position].join("|") : "";
            const none = !place && paint === "rgba(0, 0, 0, 0)|none|1";
            own.set(element, none ? around : hash([around, place, paint].join("|")));
        }
        return own.get(element);
    };
    const look = (element) => {
        const style = getComputedStyle(element);
        const text = [style.color, style.fontSize, style.fontWeight, style.textShadow];
        return hash([behind(element), ...text].join("|"));
    };
    const hasText = (element) => element.matches("input, select, textarea")
        || [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    const root = document.querySelector(selector);
    window.chosen = [root, ...root.querySelectorAll("*")].filter((element) => {
        if (!hasText(element) || !element.checkVisibility()) return false;
        const size = element.getBoundingClientRect();
        if (size.width < 2 || size.height < 2 || seen.has(look(element))) return false;
        seen.add(look(element));
        news.push(look(element));
        return true;
    });
    return news;
}
"""
"""Sets ``chosen`` to one element of each look that is not ``known``, and returns their looks."""
CONNECTED = "window.chosen.every((element) => element.isConnected)"


class Contrast:
    """Examines the contrast of texts whose look no earlier page had.

    A look is the color and font of a text and what is behind it: background and opacity of the
    elements around it, with ``classes`` also their tags, classes and positions. Those distinguish
    texts that other elements overlap, which needs to be examined in one scheme only.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()

    def violations(
        self, page: Page, part: str = "html", *, classes: bool = True
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] | None = None
        while found is None:  # again if a live update has replaced the part
            looks = page.evaluate(CHOOSE, [part, list(self._known), classes])
            if not looks:
                return []
            found = violations(page, f"runOnly: {CONTRAST}", "{include: window.chosen}", CONNECTED)
        if not found:  # a retry of a failed test finds the same
            self._known.update(looks)
        return found


def violations(page: Page, options: str = "", context: str = "'html'", when: str = "true") -> Any:
    """Return what axe finds in ``context``, a JavaScript expression; None unless ``when`` is true.

    Without ``preload``, which needs inline styles: no page depends on the orientation of a screen.
    """
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE_SCRIPT)
    options = f"{{preload: false, resultTypes: ['violations'], {options}}}"
    return page.evaluate(f"{when} ? axe.run({context}, {options}).then(r => r.violations) : null")


def describe(found: list[dict[str, Any]]) -> str:
    lines = []
    for violation in found:
        lines.append(f"{violation['impact']}: {violation['id']}: {violation['help']}")
        for node in violation["nodes"][:4]:
            lines += [
                f"    {node['html'][:160]}",
                f"        {node.get('failureSummary', '')[:300]}",
            ]
    return "\n".join(lines)


def problems_in_both_schemes(
    page: Page, name: str, contrast: Contrast, part: str = "html", *, between: bool = False
) -> list[str]:
    """What axe finds in the first element that matches the selector ``part``: violations of any
    impact in light, contrast in dark too. With ``between`` the part is also compared with the rest
    of the page."""
    problems = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        found = contrast.violations(page, part, classes=scheme == "light")
        if scheme == "light":
            found += violations(page, WITHOUT_CONTRAST, repr(part))
            if between:
                found += violations(page, BETWEEN_PARTS)
        if found:
            problems.append(f"{name}, {scheme}:\n{describe(found)}")
    return problems
