"""Query language of the runs list, e.g. ``state:running backend:modal loss<3 tag:x``.

A run must match all terms. ``name:value`` matches a value, ``name:a,b`` one of several. ``loss<3``
compares numbers (``<``, ``<=``, ``>``, ``>=``, ``=``). A bare word matches a part of the name, the
owner or a tag. A leading minus negates a term; quotes group words, and a doubled quote within them
is a quote. An invalid term is an error, because a list that silently omits runs, or shows too many,
is worse than no list.

Archived runs are hidden unless a term includes them. Parsing is pure; :func:`matching` builds the
query set.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connection
from django.db.models import Exists, F, OuterRef, Q, QuerySet, Subquery, Sum, TextField
from django.db.models.functions import Cast
from django.utils import timezone

from runs.models import ReplicaPool, Run
from runs.queries import fuzzy, rates
from runs.states import RUN_ACTIVE, RUN_ENDED, RunState

LONGEST = 500
MOST_TERMS = 20
"""Databases need seconds to plan a query with hundreds of terms."""
TEXTS = ("state", "backend", "hardware", "owner", "name", "tag", "sweep", "id", "is")
NUMBERS = {
    "loss": "eval_loss",
    "train": "train_loss",
    "tokens": "tokens",
    "speed": "tokens_per_s",
    "rounds": "committed_rounds",
    "cost": "cost_usd",
    "rate": "usd_h",
    "replicas": "pooled",
    "age": "created_at",
}
"""Name in a query -> column or annotation."""
IS = ("active", "ended", "archived", "mine")
STATE_GROUPS = {"active": RUN_ACTIVE, "ended": RUN_ENDED}
FIELDS = (*TEXTS, *NUMBERS)
VALUES = {"state": (*RunState.values, *STATE_GROUPS), "is": IS}
"""Fields that match only some words."""

_TERM = re.compile(r"(-?)([A-Za-z_]+)(<=|>=|[:<>=])(.*)", re.DOTALL)
_WORD = re.compile(r'(?:[^\s"]|"[^"]*")+')
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d{1,3}))?([kmbt]?)", re.IGNORECASE)
_AGE = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)", re.IGNORECASE)
_TIMES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LOOKUP = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte", "=": "exact", ":": "exact"}
_LONGEST_AGE_S = 1e10


class BadQuery(ValueError):
    """A query is invalid. ``word`` is the invalid term, or ''. ``similar`` is a valid term that
    looks like it, or ''."""

    def __init__(self, word: str, message: str, *, similar: str = "") -> None:
        if similar:
            message = f"{message}. Did you mean {similar}?"
        super().__init__(f"{word}: {message}" if word else message)
        self.word = word
        self.message = message
        self.similar = similar


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term. ``field`` is '' for a bare word; ``values`` are alternatives."""

    word: str
    field: str
    op: str
    values: tuple[str, ...]
    number: float = 0.0
    negated: bool = False


def parse(text: str) -> tuple[Term, ...]:
    """Parse a query. Raises :class:`BadQuery` for the first invalid term."""
    if len(text) > LONGEST:
        raise BadQuery("", f"expected at most {LONGEST} characters, found {len(text)}")
    if "\x00" in text:
        raise BadQuery("", "expected text, found a NUL character")
    if text.count('"') % 2:
        raise BadQuery(text[text.rindex('"') :], "expected a closing quote, found none")
    words = _WORD.findall(text)
    if len(words) > MOST_TERMS:
        raise BadQuery("", f"expected at most {MOST_TERMS} terms, found {len(words)}")
    return tuple(_term(word) for word in words)


def _term(word: str) -> Term:
    match = _TERM.fullmatch(word)
    if match is None:
        negated = word.startswith("-") and len(word) > 1
        bare = unquoted(word[negated:])
        if not bare:
            raise BadQuery(word, "expected a word, found nothing")
        return Term(word=word, field="", op=":", values=(bare,), negated=negated)
    minus, name, op, rest = match.groups()
    name = name.lower()
    if name in NUMBERS:
        return _compare(word, minus == "-", name, op, unquoted(rest))
    if name not in TEXTS:
        nearest = fuzzy.nearest(name, NUMBERS if op in ("<", "<=", ">", ">=") else FIELDS)
        raise BadQuery(
            word,
            f"expected one of {', '.join(FIELDS)}, found {name!r}",
            similar=f"{minus}{nearest}{op}{rest}" if nearest else "",
        )
    if op not in (":", "="):
        similar = f"{minus}{name}:{rest}" if rest else ""
        message = f"{name} is text: expected {name}:value, found {op!r}"
        raise BadQuery(word, message, similar=similar)
    values = tuple(unquoted(value) for value in _split(rest))
    if not all(values):
        raise BadQuery(word, f"expected a value after {name}{op}, found nothing")
    _check_values(word, name, values)
    return Term(word=word, field=name, op=":", values=values, negated=minus == "-")


def _split(rest: str) -> list[str]:
    """Split at commas outside quotes."""
    return re.findall(r'(?:[^,"]|"[^"]*")+', rest) if rest.strip(",") == rest and rest else [""]


def _check_values(word: str, name: str, values: Sequence[str]) -> None:
    known = VALUES.get(name)
    for value in values:
        if known is not None and value.lower() not in known:
            nearest = fuzzy.nearest(value.lower(), known)
            raise BadQuery(
                word,
                f"expected one of {', '.join(known)}, found {value!r}",
                similar=word.replace(value, nearest) if nearest else "",
            )
        if name == "id" and not _is_id(value):
            raise BadQuery(word, f"expected a run's id, found {value!r}")


def _is_id(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _compare(word: str, negated: bool, name: str, op: str, text: str) -> Term:
    match = (_AGE if name == "age" else _NUMBER).fullmatch(text)
    if match is None:
        kind = "time such as 2d, 3h or 90min" if name == "age" else "number such as 2.5, 40k or 1M"
        raise BadQuery(word, f"expected a {kind}, found {text!r}")
    if name == "age":
        number = float(match[1]) * _SECONDS[match[2].lower()]
        if number > _LONGEST_AGE_S:
            raise BadQuery(word, f"expected less than 300 years, found {text!r}")
    else:
        number = float(f"{match[1]}e{match[2] or 0}") * _TIMES[match[3].lower()]
        if number >= 2**63:
            raise BadQuery(word, f"expected less than 2^63, found {text!r}")
    return Term(word=word, field=name, op=op, values=(text,), number=number, negated=negated)


def toggled(terms: Sequence[Term], field: str, value: str) -> str:
    """The query with ``field:value`` added as an alternative, or removed if present."""
    words: list[str] = []
    values: list[str] = []
    for term in terms:
        if term.field == field and not term.negated:
            values += term.values
        else:
            words.append(term.word)
    values = [v for v in values if v != value] if value in values else [*values, value]
    if values:
        words.append(f"{field}:{','.join(quoted(v) for v in dict.fromkeys(values))}")
    return " ".join(words)


def without(terms: Sequence[Term], term: Term) -> str:
    """The query without a term."""
    return " ".join(other.word for other in terms if other is not term)


def corrected(text: str, error: BadQuery) -> str:
    """The query with the similar term in place of the invalid one; '' if there is none."""
    return text.replace(error.word, error.similar, 1) if error.similar else ""


def quoted(value: str) -> str:
    """A value as it is written in a query."""
    return '"{}"'.format(value.replace('"', '""')) if re.search(r'[\s,"]', value) else value


def unquoted(text: str) -> str:
    """The value of a part of a query."""
    return _QUOTED.sub(lambda match: match[1].replace('""', '"'), text)


def matching(runs: QuerySet[Run], terms: Sequence[Term], *, user: Any = None) -> QuerySet[Run]:
    """Filter runs by terms. ``user`` is the owner that ``is:mine`` matches.

    Annotations are added only if a term needs them.
    """
    if not any(term.field == "id" or _names_archived(term) for term in terms):
        runs = runs.filter(archived_at=None)
    if any(term.field == "replicas" for term in terms):
        pools = ReplicaPool.objects.filter(run=OuterRef("pk")).order_by()
        counted = pools.values("run").annotate(sum=Sum("count")).values("sum")
        runs = runs.alias(pooled=Subquery(counted))
    if any(term.field in ("tag", "") for term in terms):
        runs = runs.alias(tags_text=Cast(F("tags"), TextField()))
    for term in terms:
        wanted = _wanted(term, user)
        runs = runs.exclude(wanted) if term.negated else runs.filter(wanted)
    return runs


def _names_archived(term: Term) -> bool:
    return term.field == "is" and "archived" in [value.lower() for value in term.values]


def _wanted(term: Term, user: Any) -> Q:
    if term.field in NUMBERS:
        return _number(term)
    wanted = Q(pk__in=[])
    for value in term.values:
        wanted |= _text(term.field, value, user)
    return wanted


def _number(term: Term) -> Q:
    column, lookup = NUMBERS[term.field], _LOOKUP[term.op]
    if term.field == "age":
        # A greater age is an earlier creation time.
        reversed_ = {"lt": "gt", "lte": "gte", "gt": "lt", "gte": "lte"}.get(lookup, lookup)
        return Q(**{f"{column}__{reversed_}": timezone.now() - timedelta(seconds=term.number)})
    if term.field == "rate":
        return rates.compare(lookup, term.number)
    wanted = Q(**{f"{column}__isnull": False, f"{column}__{lookup}": term.number})
    if term.field == "cost" and lookup not in ("gt", "gte"):
        # With an unknown price the sum is a lower bound, which can only show that it is exceeded.
        unpriced = rates.unpriced_attempts().filter(replica__run=OuterRef("pk"))
        wanted &= ~Q(Exists(unpriced))
    return wanted


def _text(field: str, value: str, user: Any) -> Q:
    if field == "state":
        group = STATE_GROUPS.get(value.lower())
        return Q(state__in=sorted(group)) if group else Q(state=value.lower())
    if field == "is":
        return {
            "active": Q(state__in=sorted(RUN_ACTIVE)),
            "ended": Q(state__in=sorted(RUN_ENDED)),
            "archived": Q(archived_at__isnull=False),
            "mine": Q(owner=user) if user is not None else Q(pk__in=[]),
        }[value.lower()]
    if field in ("backend", "hardware"):
        return Q(Exists(ReplicaPool.objects.filter(run=OuterRef("pk"), **{field: value})))
    if field == "owner":
        return Q(owner__username__iexact=value)
    if field == "id":
        return Q(pk=uuid.UUID(value))
    if field == "tag":
        return _tagged(value)
    if field == "sweep":
        return Q(sweep=uuid.UUID(value)) if _is_id(value) else Q(sweep__name__iexact=value)
    if field == "name":
        return Q(name__icontains=value)
    return Q(name__icontains=value) | Q(owner__username__iexact=value) | _tagged(value)


def _tagged(tag: str) -> Q:
    # The tag as in the JSON text of the column, with quotes; SQLite stores it escaped.
    return Q(tags_text__icontains=json.dumps(tag, ensure_ascii=connection.vendor == "sqlite"))
