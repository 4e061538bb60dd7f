"""The query language of the runs list: valid and invalid terms, and matching runs."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from django.utils import timezone

from runs.models import Replica, ReplicaPool, Run
from runs.queries import search
from runs.queries.search import BadQuery, parse
from tests.browser import seed


@pytest.mark.parametrize(
    ("text", "field", "op", "values"),
    [
        ("state:running", "state", ":", ("running",)),
        ("STATE:Running", "state", ":", ("Running",)),
        ("state:running,stalled", "state", ":", ("running", "stalled")),
        ('name:"two words"', "name", ":", ("two words",)),
        ('"two words"', "", ":", ("two words",)),
        ("loss<3", "loss", "<", ("3",)),
        ("tokens>=1.5M", "tokens", ">=", ("1.5M",)),
        ("cost=0", "cost", "=", ("0",)),
        ("age<2d", "age", "<", ("2d",)),
        ("sweep", "", ":", ("sweep",)),
        ("a-b", "", ":", ("a-b",)),
        ("tag:x/y", "tag", ":", ("x/y",)),
        ('tag:"1"" disk",b', "tag", ":", ('1" disk', "b")),
        ('"the ""best"""', "", ":", ('the "best"',)),
    ],
)
def test_valid_terms(text: str, field: str, op: str, values: tuple[str, ...]) -> None:
    (term,) = parse(text)
    assert (term.field, term.op, term.values, term.negated) == (field, op, values, False)
    (term,) = parse("-" + text)
    assert (term.field, term.negated) == (field, True)


@pytest.mark.parametrize("value", ['1"', '"', '""', 'a "b", c', "a b", "a,b", "plain"])
def test_a_quoted_value_is_parsed_to_itself(value: str) -> None:
    (term,) = parse(f"tag:{search.quoted(value)}")
    assert term.values == (value,)
    assert parse(search.toggled((), "tag", value)) == (term,)


def test_numbers_and_times() -> None:
    result = [t.number for t in parse("tokens>1.5M loss<.5 cost<=2e3 tokens<3b age>90min age<1w")]
    assert result == [1.5e6, 0.5, 2000, 3e9, 5400, 604_800]


def test_empty_query_has_no_terms() -> None:
    assert parse("") == parse("   ") == ()


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        ("loss<abc", "loss<abc", "expected a number such as 2.5, 40k or 1M, found 'abc'"),
        ("ok los<3", "los<3", "expected one of state, backend"),
        ("state:runing", "state:runing", "found 'runing'"),
        ("state:", "state:", "expected a value after state:, found nothing"),
        ("state:running,", "state:running,", "expected a value"),
        ("state<3", "state<3", "state is text"),
        ("age<2", "age<2", "expected a time such as 2d"),
        ("age<99999999999d", "age<99999999999d", "less than 300 years"),
        ("tokens>1e300", "tokens>1e300", "less than 2^63"),
        ('name:"x', '"x', "closing quote"),
        ("id:7", "id:7", "expected a run's id"),
        ("is:odd", "is:odd", "expected one of active, ended, archived, mine"),
        ('""', '""', "expected a word"),
        ("x" * 501, "", "at most 500 characters, found 501"),
        ("a " * 21, "", "at most 20 terms, found 21"),
        ("a\x00b", "", "NUL"),
    ],
)
def test_invalid_terms_are_named_with_the_reason(text: str, word: str, message: str) -> None:
    with pytest.raises(BadQuery) as result:
        parse(text)
    assert result.value.word == word
    assert message in result.value.message


@pytest.fixture
def operator_user() -> Any:
    return seed.user("olga", "operator")


@pytest.fixture
def _runs(operator_user: Any) -> None:
    now = timezone.now()

    def run(name: str, backend: str = "local", price: float | None = 1.0, **fields: Any) -> Run:
        made = Run.objects.create(
            **{
                "name": name,
                "owner": operator_user,
                "state": "running",
                "state_since": now,
                "created_at": now,
                "rendezvous": f"file:///{name}",
                "workload": {},
                "group_settings": seed.group_settings(),
                "submit_key": name,
            }
            | fields
        )
        pool = ReplicaPool.objects.create(run=made, backend=backend, count=2, price_usd_h=price)
        if price is None:
            replica = Replica.objects.create(run=made, pool=pool, number=0, state_since=now)
            replica.attempts.create(number=1, launch_key=name, created_at=now, launched_at=now)
        return made

    run("alpha", eval_loss=2.0, tokens=5000, tags=["sweep", "a"], cost_usd=3.0)
    run("beta", "modal", eval_loss=3.5, state="stalled", tags=["sweep-2", 'q"é'], cost_usd=9.0)
    run("gamma", "modal", None, state="succeeded", created_at=now - datetime.timedelta(days=3))
    run("delta", state="failed", archived_at=now, eval_loss=1.0)
    run("epsilon", owner=seed.user("oscar", "operator"), tokens=10**9)
    pool = ReplicaPool.objects.get(run__name="epsilon")
    ReplicaPool.objects.create(run=pool.run, backend="modal", count=6, price_usd_h=0.0)


@pytest.mark.django_db
@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "alpha beta epsilon gamma"),
        ("state:running", "alpha epsilon"),
        ("state:Running,stalled", "alpha beta epsilon"),
        ("-state:running", "beta gamma"),
        ("is:active", "alpha beta epsilon"),
        ("state:ended", "gamma"),
        ("is:Archived", "delta"),
        ("-is:archived", "alpha beta epsilon gamma"),
        ("is:archived,active", "alpha beta delta epsilon"),
        ("archived", ""),
        ("tag:archived", ""),
        ("is:mine", "alpha beta gamma"),
        ("-is:mine", "epsilon"),
        ("backend:modal", "beta epsilon gamma"),
        ("-backend:modal", "alpha"),
        ("backend:modal,local", "alpha beta epsilon gamma"),
        ("backend:modal loss<4", "beta"),
        ("loss<3", "alpha"),
        ("-loss<3", "beta epsilon gamma"),
        ("loss>=2 loss<=3.5", "alpha beta"),
        ("tokens>5k", "epsilon"),
        ("tokens>=5k", "alpha epsilon"),
        ("cost<5", "alpha epsilon"),
        ("cost>5", "beta"),
        ("replicas>2", "epsilon"),
        ("age>2d", "gamma"),
        ("age<2d", "alpha beta epsilon"),
        ("tag:sweep", "alpha"),
        ("tag:SWEEP", "alpha"),
        ("-tag:sweep", "beta epsilon gamma"),
        ("tag:q", ""),
        ("owner:Oscar", "epsilon"),
        ("name:ALPH", "alpha"),
        ("amm", "gamma"),
        ("oscar", "epsilon"),
        ("sweep-2", "beta"),
        ("50%", ""),
        ("name:_", ""),
        ("hardware:cpu -backend:modal", "alpha"),
    ],
)
def test_matching_runs(text: str, expected: str, operator_user: Any) -> None:
    runs = search.matching(Run.objects.all(), parse(text), user=operator_user)
    assert sorted(runs.values_list("name", flat=True)) == expected.split()


@pytest.mark.django_db
@pytest.mark.usefixtures("_runs")
def test_a_tag_with_odd_signs_is_found() -> None:
    term = search.Term(word="", field="tag", op=":", values=('q"é',))
    assert search.matching(Run.objects.all(), [term]).get().name == "beta"


@pytest.mark.django_db
@pytest.mark.usefixtures("_runs")
def test_an_id_finds_an_archived_run_too() -> None:
    run = Run.objects.get(name="delta")
    assert search.matching(Run.objects.all(), parse(f"id:{run.pk}")).get() == run
