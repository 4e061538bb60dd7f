"""Fail on words and phrases that do not belong in technical English.

The check covers Markdown, templates, page scripts, configuration files and Python: identifiers,
comments, docstrings, and every string that has a space or begins with a capital letter. Strings
such as ``"round_id"`` are left out, because names on the wire change with the protocol only.

``scripts/check_language.py`` checks every file that git tracks; with arguments, the named files
and folders. Each finding is one line: path, line, the text found, the term to use instead.

``RULES`` is the list of words. ``ALLOWED`` is the list of exceptions, each with its reason. Code in
scripts is not checked, nor are the names of variables in templates.
"""

from __future__ import annotations

import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

REPORT = "report, log, show, publish, send"
NO_ACTOR = "name the actor: no replica, no user, no process"
ANY_ACTOR = "name the actor: any user, every process"
OUTCOME = "result, outcome, decision"


@dataclass(frozen=True)
class Rule:
    """Words as a regular expression, and what to write instead."""

    words: str
    instead: str
    in_names: bool = False
    """The rule applies to the parts of Python identifiers too (``is_told``, ``LedgerEntry``)."""


RULES = (
    Rule("told|tell|tells|telling|untold", REPORT, in_names=True),
    Rule("said|say|says|saying", REPORT, in_names=True),
    Rule("nobody|no one", NO_ACTOR, in_names=True),
    Rule("somebody|someone", "name the actor: the operator, a process, a replica", in_names=True),
    Rule("whoever|whomever|everybody|everyone|anybody|anyone", ANY_ACTOR, in_names=True),
    Rule("ledgers?", "local progress, log, record", in_names=True),
    Rule("verdicts?", OUTCOME, in_names=True),
    Rule("innocent|innocence", "excused, not counted", in_names=True),
    Rule("pleads?|pleaded|guilty|acquit(?:s|ted)?|culprits?", OUTCOME, in_names=True),
    Rule("mend|mends|mended|mending", "fix, repair, recover", in_names=True),
    Rule("heed|heeds|heeded|heeding", "handle, obey, process", in_names=True),
    Rule("naught|aught|anew|lest|whence|thence|whither", "a common word", in_names=True),
    Rule("upon which|thereupon|whereupon|hereupon", "on which, then"),
    Rule("of (?:its|their|his|her|one's) own accord", "without a request, automatically"),
    Rule(
        r"of (?:its|their) own(?=\s*[.,;:)]| (?:that|which|and|or|in|at|for|to|with|by|is|on))",
        "its own ..., a separate ...",
    ),
    Rule("(?:is|are|was|were) at work", "is running"),
    Rule("for want of", "because there is no ..., without"),
    Rule("more than (?:you|it|they) may", "can, is allowed to"),
    Rule("mak(?:e|es|ing) known", "publish, report"),
)
CLAUSE = re.compile(r"(?:^|(?<=[.:]\s))\s*(?:What|Who|Whose) [^.?!:]*\.(?=\s|$)")
CLAUSE_INSTEAD = "a noun or an imperative: 'Problems of the docs', 'Return the members'"

ALLOWED: tuple[tuple[str, str, str], ...] = (
    # (path pattern, text found or *, reason)
    ("scripts/check_language.py", "*", "lists the words"),
    ("tests/scripts/test_check_language.py", "*", "tests the words"),
    ("static/vendor/*", "*", "code of others"),
    ("static/dist/*", "*", "built from static/js"),
    ("runs/migrations/*", "*", "generated, and never changed afterwards"),
    ("requirements/*", "*", "generated"),
    ("*LICENSE", "*", "legal text"),
)
IO_METHOD = re.compile(r"(?:\.|def )tell\((?:self)?\)")
"""``tell()`` of Python's file protocol is the one use of that name."""

TEXT_SUFFIXES = {".md", ".html", ".txt", ".css", ".yml", ".yaml", ".toml", ".sh", ".svg"}
TEXT_NAMES = {"Makefile", "web.Dockerfile", "replica.Dockerfile", "env.example", "run"}
_NAME_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_SCRIPT_TEXT = re.compile(
    r"/\*.*?\*/|(?<![:\\])//[^\n]*"
    r'|"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`",
    re.DOTALL,
)


@dataclass(frozen=True)
class Finding:
    """A text at a line of a file, and the term to use instead."""

    path: str
    line: int
    text: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: “{self.text}”: {self.instead}"


def _compiled(rule: Rule) -> re.Pattern[str]:
    words = rule.words.replace(" ", r"\s+")
    return re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE)


_PATTERNS = tuple((rule, _compiled(rule)) for rule in RULES)


def check_file(path: Path, root: Path) -> list[Finding]:
    """Return the findings in one file, without the allowed ones, by line."""
    name = path.resolve().relative_to(root).as_posix()
    if _is_allowed(name, "*"):
        return []
    checks = {".py": _check_python, ".js": _check_script, ".mjs": _check_script}
    if path.suffix in checks:
        found = checks[path.suffix](name, path.read_text(encoding="utf-8"))
    elif path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES:
        found = _check_text(name, 1, _without_addresses(path.read_text(encoding="utf-8")))
    else:
        return []
    kept = {finding for finding in found if not _is_allowed(name, finding.text.lower())}
    return sorted(kept, key=lambda finding: (finding.line, finding.text))


def _is_allowed(name: str, text: str) -> bool:
    return any(
        fnmatch(name, pattern) and allowed in {"*", text} for pattern, allowed, _reason in ALLOWED
    )


def _check_text(name: str, first_line: int, text: str) -> Iterator[Finding]:
    """Findings in prose, whose first line is line ``first_line`` of the file ``name``."""

    def at(match: re.Match[str], instead: str) -> Finding:
        start = match.end() - len(match[0].lstrip())
        line = first_line + text.count("\n", 0, start)
        return Finding(name, line, _short(match[0]), instead)

    for rule, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            yield at(match, rule.instead)
    for match in CLAUSE.finditer(text):
        yield at(match, CLAUSE_INSTEAD)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:57] + "..."


def _without_addresses(text: str) -> str:
    return re.sub(r"https?://[^\s)>\"']+", lambda match: "x" * len(match[0]), text)


def _check_python(name: str, text: str) -> Iterator[Finding]:
    lines = text.splitlines()
    comment = ""
    comment_line = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comment_line + comment.count("\n") + 1 == token.start[0] and comment:
                comment += "\n" + token.string.lstrip("#! ")
            else:
                yield from _check_text(name, comment_line, comment)
                comment, comment_line = token.string.lstrip("#! "), token.start[0]
        elif token.type == tokenize.NAME:
            yield from _check_name(name, token, lines[token.start[0] - 1])
        elif _is_string(token) and _is_prose(token.string):
            prose = _blank_quotes(token.string)
            yield from _check_text(name, token.start[0], _without_addresses(prose))
    yield from _check_text(name, comment_line, comment)


def _is_string(token: tokenize.TokenInfo) -> bool:
    return token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"


def _is_prose(string: str) -> bool:
    """A sentence, a phrase or a label, in contrast to a key."""
    inner = string.lstrip("rRbBfFuU").strip("\"'")
    return bool(re.search(r"\s", inner)) or inner[:1].isupper()


def _blank_quotes(string: str) -> str:
    """``string`` without its prefix and quotes; lines stay where they are."""
    inner = re.sub(r"^[rRbBfFuU]{0,2}(\"\"\"|'''|\"|')", "", string)
    return re.sub(r"(\"\"\"|'''|\"|')$", "", inner)


def _check_name(name: str, token: tokenize.TokenInfo, line: str) -> Iterator[Finding]:
    for rule in _rules_against(token.string):
        around = line[max(0, token.start[1] - 4) : token.end[1] + 6]
        if token.string != "tell" or not IO_METHOD.search(around):
            yield Finding(name, token.start[0], token.string, rule.instead)


@functools.cache
def _rules_against(identifier: str) -> list[Rule]:
    parts = " ".join(_NAME_PARTS.findall(identifier))
    return [rule for rule, pattern in _PATTERNS if rule.in_names and pattern.search(parts)]


def _check_script(name: str, text: str) -> Iterator[Finding]:
    """Comments and strings of a script; code inside ``${}`` counts as prose."""
    for match in _SCRIPT_TEXT.finditer(text):
        string = match[0]
        if string[0] == "/" or _is_prose(string.strip("`")):
            line = 1 + text.count("\n", 0, match.start())
            prose = re.sub(r"^(?://|/\*+)|^\s*\*+/?|\*/$", "", string, flags=re.MULTILINE)
            yield from _check_text(name, line, _without_addresses(prose.strip("`\"' ")))


def tracked_files(root: Path) -> list[Path]:
    """Every file that git tracks under ``root``, and new ones that git does not ignore."""
    listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard")
    return [path for path in (root / name for name in listed) if path.is_file()]


def _git(folder: Path, *arguments: str) -> list[str]:
    return subprocess.check_output(["git", *arguments], cwd=folder, text=True).splitlines()


def main(arguments: list[str]) -> int:
    root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel")[0])
    chosen = [Path(argument).resolve() for argument in arguments] or [root]
    findings = [
        finding
        for path in tracked_files(root)
        if any(path == one or one in path.parents for one in chosen)
        for finding in check_file(path, root)
    ]
    for finding in findings:
        print(finding)
    print(f"language: {len(findings)} findings" if findings else "language: no findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
