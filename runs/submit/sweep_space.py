"""The space of a sweep: which fields have which values, and the runs that result.

A field is a path of the document, e.g. ``settings.inner_lr`` or ``workload.size``; ``inner_lr``
alone, or its label, is a group setting. Its values are a list, or text: ``1e-4, 3e-4, 1e-3``, or a
range such as ``1e-4..1e-2 x5 log`` (five values, at equal ratios) and ``2..8 x4`` (at equal
distances). Every combination of the values is a run. Parsing is pure, and takes time linear in the
text.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.protocol.settings import SettingsError, SettingSpec, setting_fields
from runs.exceptions import InvalidRun
from runs.submit.names import NAME_LENGTH
from runs.submit.run_draft import RunDraft

MOST_RUNS = 100
MOST_FIELDS = 4
TEXT_LENGTH = 4000
DERIVED = frozenset({"num_replicas", "start_replicas"})
"""Settings that follow from the pools, and on the form from the field ``start``."""

_RANGE = re.compile(
    r"(?P<first>[^\s.][^\s]*?)\.\.(?P<last>\S+)\s+x(?P<count>[0-9]{1,4})(?P<log>\s+log)?"
)
_SCALARS = (str, int, float)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A swept field and its distinct values."""

    field: str
    values: tuple[Any, ...]

    @property
    def label(self) -> str:
        name = self.field.partition(".")[2]
        spec = _specs().get(name) if self.field.startswith("settings.") else None
        return spec.label if spec else name.replace("_", " ").capitalize()


def parse_lines(text: str) -> list[tuple[str, str]]:
    """``field = values`` of each line. Raises :class:`InvalidRun` for ``sweep``."""
    if len(text) > TEXT_LENGTH:
        raise _wrong(f"expected at most {TEXT_LENGTH} characters, found {len(text)}")
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        field, sign, values = line.partition("=")
        if not sign or not field.strip() or not values.strip():
            raise _wrong(f"line {number}: expected field = values, found {line.strip()[:80]!r}")
        pairs.append((field.strip(), values.strip()))
    return pairs


def parameters_of(pairs: Sequence[tuple[str, Any]], draft: RunDraft) -> tuple[Parameter, ...]:
    """The swept fields of a draft, with checked values. Raises :class:`InvalidRun` for ``sweep``.

    A value is a list, or text in the format of this module.
    """
    if not 1 <= len(pairs) <= MOST_FIELDS:
        raise _wrong(f"expected 1 to {MOST_FIELDS} fields, found {len(pairs)}")
    parameters = tuple(_parameter(field, values, draft) for field, values in pairs)
    fields = [parameter.field for parameter in parameters]
    if repeated := next((field for field in fields if fields.count(field) > 1), ""):
        raise _wrong(f"expected {repeated} once, found it twice")
    count = math.prod(len(parameter.values) for parameter in parameters)
    if not 2 <= count <= MOST_RUNS:
        raise _wrong(f"expected values that make 2 to {MOST_RUNS} runs, found {count:,}")
    return parameters


def combinations(parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
    """The values of each run: a grid, in which the last field changes fastest."""
    fields = [parameter.field for parameter in parameters]
    grid = itertools.product(*(parameter.values for parameter in parameters))
    return [dict(zip(fields, values, strict=True)) for values in grid]


def draft_with(draft: RunDraft, values: Mapping[str, Any]) -> RunDraft:
    """The draft of one run. Raises :class:`InvalidRun` for values that do not fit together."""
    parts: dict[str, dict[str, Any]] = {"settings": {}, "workload": {}}
    for field, value in values.items():
        head, _, name = field.partition(".")
        parts[head][name] = value
    words = words_of(values)
    try:
        changed = replace(
            draft,
            settings=replace(draft.settings, **parts["settings"]),
            workload=replace(draft.workload, **parts["workload"]),
        )
    except SettingsError as error:
        where = f"{error.field}: " if error.field else ""
        raise _wrong(f"with {words}: {where}{error.message}") from None
    tail = f" · {words}"
    room = max(NAME_LENGTH - len(tail), 20)
    return replace(changed, name=(draft.name.strip()[:room] + tail)[:NAME_LENGTH])


def words_of(values: Mapping[str, Any]) -> str:
    """The values of a run in a line, e.g. ``inner_lr=0.001, size=micro``."""
    return ", ".join(
        f"{field.partition('.')[2]}={_plain(value)}" for field, value in values.items()
    )


def _parameter(field: str, given: Any, draft: RunDraft) -> Parameter:
    path = field if "." in field else f"settings.{_setting_name(field)}"
    head, _, name = path.partition(".")
    try:
        if head == "settings":
            spec = _specs().get(name)
            if spec is None or name in DERIVED:
                raise _wrong(f"expected a group setting, found {field[:60]!r}{_similar(field)}")
            values = [spec.check(value) for value in _values(given, spec.kind)]
        elif (
            head == "workload"
            and isinstance(getattr(draft.workload, name, None), str | int)
            and name in _fields(draft)
        ):
            values = _of_workload(given, name, draft)
        else:
            raise _wrong(
                "expected settings.<name> or a number or text of the workload, found "
                f"{field[:60]!r}"
            )
    except SettingsError as error:
        raise _wrong(f"{path}: {error.message}") from None
    except TypeError:
        raise _wrong(f"{path}: expected values of the field's type") from None
    return Parameter(field=path, values=tuple(dict.fromkeys(values)))


def _setting_name(text: str) -> str:
    """The name of a group setting that is given by its name, or by its label on the form."""
    labels = {spec.label.casefold(): name for name, spec in _specs().items()}
    return labels.get(text.casefold(), text)


def _similar(text: str) -> str:
    """Settings with a similar name or label, as the end of an error message."""
    names = {word.casefold(): name for name, s in _specs().items() for word in (name, s.label)}
    found = difflib.get_close_matches(text[:60].casefold(), names, n=2)
    similar = dict.fromkeys(names[word] for word in found)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def _of_workload(given: Any, name: str, draft: RunDraft) -> list[Any]:
    kind = "int" if isinstance(getattr(draft.workload, name), int) else "choice"
    values = _values(given, kind)
    if kind == "int":
        if not all(_is_whole(value) for value in values):
            raise _wrong(f"workload.{name}: expected whole numbers up to 2^53, found others")
        values = [int(value) for value in values]
    for value in values:
        replace(draft.workload, **{name: value})
    return values


def _is_whole(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= 2**53 and value == int(value)


def _fields(draft: RunDraft) -> set[str]:
    return {field.name for field in dataclasses.fields(draft.workload)} - {"archive"}


def _specs() -> dict[str, SettingSpec]:
    return {spec.name: spec for spec in setting_fields()}


def _values(given: Any, kind: str) -> list[Any]:
    """Values of a list, or of text. A range of whole numbers is rounded to them."""
    if isinstance(given, str):
        match = _RANGE.fullmatch(given.strip())
        if match is not None:
            return _range(match, kind)
        given = [part.strip() for part in given.split(",")]
        if not all(given):
            raise _wrong("expected a value between two commas, found nothing")
        given = given if kind == "choice" else [_number(part) for part in given]
    if not isinstance(given, list | tuple) or not given:
        raise _wrong(f"expected a list of values, found {str(given)[:40]!r}")
    if len(given) > MOST_RUNS:
        raise _wrong(f"expected at most {MOST_RUNS} values, found {len(given)}")
    if not all(isinstance(value, _SCALARS) for value in given):
        raise _wrong("expected values that are numbers or text, found others")
    return list(given)


def _range(match: re.Match[str], kind: str) -> list[Any]:
    """``count`` values from the first limit to the last, both exact."""
    if kind == "choice":
        raise _wrong("expected a list of values, found a range")
    first, last, count = _number(match["first"]), _number(match["last"]), int(match["count"])
    if not 2 <= count <= MOST_RUNS:
        raise _wrong(f"expected x2 to x{MOST_RUNS}, found x{count}")
    shares = [i / (count - 1) for i in range(1, count - 1)]
    if match["log"]:
        if min(first, last) <= 0:
            raise _wrong("expected limits above 0 for a log range, found others")
        # The difference of logarithms is finite where that of the limits or their ratio is not.
        low, high = math.log(first), math.log(last)
        steps = [low * (1 - share) + high * share for share in shares]
        between = [math.exp(min(step, max(low, high))) for step in steps]
    else:
        between = [first * (1 - share) + last * share for share in shares]
    if kind == "int":
        return [round(value) for value in (first, *between, last)]
    values = [first, *(float(f"{value:.4g}") for value in between), last]
    if not all(map(math.isfinite, values)):
        raise _wrong(f"expected finite values, found {match[0][:60]!r}")
    return values


def _number(text: str) -> float:
    try:
        value = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _wrong(f"expected a number, found {text[:40]!r}")
    return value


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:30]


def _wrong(message: str) -> InvalidRun:
    return InvalidRun("sweep", message)
