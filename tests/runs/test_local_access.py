"""The local backend and custom code on it need separate permissions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from diloco.protocol.workload import CustomWorkload
from runs import local_access
from runs.actions import replicas_and_pools
from runs.exceptions import InvalidRun
from runs.models import Run
from runs.reconcile.launch import launch_replica
from runs.submit.create import create_run
from runs.submit.run_draft import PoolDraft
from tests.runs import run_harness as w
from tests.runs.launching import launched

pytestmark = pytest.mark.django_db

GPT, CUSTOM = {"kind": "byte_gpt"}, {"kind": "custom"}


@pytest.fixture(autouse=True)
def _no_grant(settings: Any) -> None:
    settings.OPERATORS_LOCAL = "none"


def operator(*permissions: str) -> Any:
    user = w.person("olga", "operator")
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return type(user).objects.get(pk=user.pk)  # permissions are cached


def refusals(user: Any) -> list[bool]:
    return [bool(local_access.refused_local(user, "local", work)) for work in (GPT, CUSTOM)]


@pytest.mark.parametrize(
    ("permissions", "refused"),
    [
        ((), [True, True]),
        (("use_local_backend",), [False, True]),
        (("run_custom_code_locally",), [True, True]),
        (("use_local_backend", "run_custom_code_locally"), [False, False]),
    ],
)
def test_permissions(permissions: tuple[str, ...], refused: list[bool]) -> None:
    assert refusals(operator(*permissions)) == refused


@pytest.mark.parametrize(
    ("grant", "refused"),
    [("none", [True, True]), ("backend", [False, True]), ("code", [False, False])],
)
def test_the_setting_for_all_operators(settings: Any, grant: str, refused: list[bool]) -> None:
    settings.OPERATORS_LOCAL = grant
    assert refusals(operator()) == refused
    assert refusals(w.person("vera", "viewer")) == [True, True]
    assert refusals(None) == [True, True]


def test_administrators_have_both() -> None:
    assert refusals(w.person("ada", "admin")) == [False, False]
    assert refusals(w.person("root", superuser=True)) == [False, False]


def test_packages_are_code() -> None:
    user = operator("use_local_backend")
    assert local_access.refused_local(user, "local", {"kind": "x", "requirements": ["evil"]})
    assert not local_access.refused_local(user, "kubernetes", CUSTOM)


def test_a_run_is_refused_at_its_pool(outbox: list[Any]) -> None:
    with pytest.raises(InvalidRun) as refused:
        create_run(w.draft(), owner=operator(), submit_key="k")
    assert refused.value.field == "pools.0.backend"
    assert "runs.use_local_backend" in refused.value.message
    code = w.draft(workload=CustomWorkload(function="train:build"))
    with pytest.raises(InvalidRun, match="run custom code"):
        create_run(code, owner=operator("use_local_backend"), submit_key="k")
    assert not Run.objects.exists()


def test_revoked_permission_blocks_the_launch(
    make_run: Callable[..., Any], executor: w.FakeExecutor, settings: Any
) -> None:
    settings.OPERATORS_LOCAL = "code"
    run = launched(make_run())
    settings.OPERATORS_LOCAL = "none"
    launch_replica(run.replicas.first().pk)
    pool = run.pools.get()
    assert executor.launches == 0
    assert "runs.use_local_backend" in pool.last_error


def test_pools_are_not_added_or_grown_without_the_permission(
    make_harness: Callable[..., Any], settings: Any
) -> None:
    settings.OPERATORS_LOCAL = "code"
    harness = make_harness(replicas=2, max_replicas=8)
    harness.start()
    settings.OPERATORS_LOCAL = "none"
    with pytest.raises(InvalidRun, match="use_local_backend"):
        replicas_and_pools.add_pool(harness.run, PoolDraft(count=1), actor=operator())
    with pytest.raises(InvalidRun, match="use_local_backend"):
        replicas_and_pools.scale_pool(harness.run.pools.get(), 4, actor=operator())
    admin = w.person("ada", "admin")
    assert (
        replicas_and_pools.add_pool(harness.run, PoolDraft(count=1), actor=admin).added_by == admin
    )
    assert replicas_and_pools.scale_pool(harness.run.pools.first(), 1, actor=operator()) == -1


def test_form_names_the_forbidden_backend() -> None:
    from dashboard.forms import PoolChoices

    for user, permitted in ((operator(), False), (w.person("ada", "admin"), True)):
        label = str(dict(PoolChoices.load(user).backends)["local"])
        assert ("not permitted" not in label) == permitted
