"""Browser tests wait for what they read, as long as all others, and leave their browser context as
it was.

A page changes some time after a click, a key press or a published delta, so a value that is read
at once can be the old one. `expect` waits, also for addresses, texts and counts. This test reads
the source: it refuses a read inside `assert` that `expect` has an assertion for, and any other read
that follows an action without a wait in between.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

BROWSER = Path(__file__).parent / "browser"
ACTIONS = {
    *("check", "click", "dblclick", "down", "fill", "go_back", "go_forward", "goto", "hover"),
    *("open", "press", "publish", "reload", "select_option", "set_input_files"),
    *("set_viewport_size", "type", "uncheck", "up", "wheel"),
}
WEB_FIRST = {
    *("all_inner_texts", "all_text_contents", "count", "get_attribute", "inner_text"),
    *("input_value", "is_checked", "is_enabled", "is_hidden", "is_visible", "text_content"),
}
"""Reads that an assertion of `expect` replaces; an attribute ``url`` counts too."""
OTHER_READS = {"aria_snapshot", "bounding_box", "evaluate", "evaluate_all"}
WAITS = {"eventually", "expect", "expect_address", "overflow", "settle"}
NOT_PAGES = {"empty_site", "request", "self", "site", "window"}


class Reader:
    """Visits the nodes of a function in the order of execution, and helpers where they are called.

    A function that is passed on, e.g. to `eventually`, is not visited.
    """

    def __init__(self, helpers: Mapping[str, ast.FunctionDef]) -> None:
        self.refused: list[int] = []
        self._helpers = dict(helpers)
        self._waited = True
        self._asserts = False

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Lambda() | ast.FunctionDef():
                return
            case ast.Assert():
                self._asserts = True
                self.visit(node.test)
                self._asserts = False
            case ast.For() | ast.While():
                for child in 2 * list(ast.iter_child_nodes(node)):
                    self.visit(child)
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr="evaluate"))):
                return  # it changes the page, at once
            case _:
                for child in ast.iter_child_nodes(node):
                    self.visit(child)
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
                self._called(name, node)
            case ast.Attribute(value=ast.Name(id=owner), attr="url") if owner not in NOT_PAGES:
                self._read(node, web_first=True)
            case ast.With() if any(_is_wait(item.context_expr) for item in node.items):
                self._waited = True

    def _called(self, name: str, call: ast.Call) -> None:
        if name in self._helpers and isinstance(call.func, ast.Name):
            helper = self._helpers.pop(name)
            for statement in helper.body:
                self.visit(statement)
            self._helpers[name] = helper
        elif name in WAITS or (name.startswith("wait_for") and name != "wait_for_timeout"):
            self._waited = True
        elif name in ACTIONS:
            self._waited = False
        elif name in WEB_FIRST | OTHER_READS:
            self._read(call, web_first=name in WEB_FIRST)

    def _read(self, node: ast.expr, *, web_first: bool) -> None:
        if not self._waited or (web_first and self._asserts):
            self.refused.append(node.lineno)


def _is_wait(node: ast.expr) -> bool:
    call = node.func if isinstance(node, ast.Call) else node
    return isinstance(call, ast.Attribute) and call.attr.startswith("expect_")


def refused(source: str) -> list[int]:
    """Line numbers of reads that do not wait."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    helpers = {one.name: one for one in functions if not one.name.startswith("test_")}
    result: set[int] = set()
    for function in functions:
        if function.name not in helpers:
            reader = Reader(helpers)
            for statement in function.body:
                reader.visit(statement)
            result.update(reader.refused)
    return sorted(result)


@pytest.mark.parametrize("path", sorted(BROWSER.glob("test_*.py")), ids=lambda path: path.name)
def test_no_browser_test_reads_a_page_that_can_still_change(path: Path) -> None:
    lines = refused(path.read_text())
    assert not lines, f"{path.name}: expected `expect` or a wait before the reads of lines {lines}"


def test_reads_that_do_not_wait_are_refused() -> None:
    source = """
def cells(page):
    return page.locator("th").all_inner_texts()

def test_list(page):
    page.locator("a").click()
    expect(page.locator("h1")).to_have_text("Runs")
    heads = cells(page)
    page.locator("b").click()
    assert "Age" in cells(page)
    assert "sort" in page.url
    box = page.locator("c").bounding_box()
    eventually(page, lambda: page.evaluate("scrollY"), lambda pixels: pixels > 0)
    box = page.locator("c").bounding_box()
"""
    assert refused(source) == [3, 11, 12]


def changes_shared_context(source: str) -> list[str]:
    """Names of tests that leave a clock or an init script in a context that other tests use."""
    result = []
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        text = ast.unparse(function)
        changes = ".clock." in text or ".context.add_init_script(" in text
        if changes and "window.open(" in text and "alone=True" not in text:
            result.append(function.name)
    return result


@pytest.mark.parametrize("path", sorted(BROWSER.glob("test_*.py")), ids=lambda path: path.name)
def test_a_context_with_a_clock_or_an_init_script_is_used_once(path: Path) -> None:
    names = changes_shared_context(path.read_text())
    assert not names, f"{path.name}: expected `window.open(..., alone=True)` in {names}"


def test_lasting_changes_of_a_shared_context_are_refused() -> None:
    source = """
def test_clock(window):
    page = window.open("/")
    page.clock.install()

def test_alone(window):
    page = window.open("/", alone=True)
    page.context.add_init_script("1")

def test_own_page(page):
    page.clock.install()
"""
    assert changes_shared_context(source) == ["test_clock"]


def own_limits(source: str) -> list[int]:
    """Line numbers of calls that wait for another time than all browser tests."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return sorted(
        {call.lineno for call in calls if any(one.arg == "timeout" for one in call.keywords)}
    )


def test_browser_tests_wait_as_long_as_on_a_busy_machine() -> None:
    found = {path.name: own_limits(path.read_text()) for path in BROWSER.glob("test_*.py")}
    refused = {name: lines for name, lines in found.items() if lines}
    assert not refused, f"expected the common limit, PATIENCE_MS, in the lines {refused}"


def test_own_limits_are_refused() -> None:
    source = """
expect(row).to_be_visible()
expect(row).to_be_visible(timeout=60_000)
page.locator("a").click(force=True, timeout=5)
"""
    assert own_limits(source) == [3, 4]
