"""Pool options that reach into a cluster or account are accepted only by pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.utils import timezone

from executors.registry import pool_options
from runs.admin.credential_form import ALLOWED, form_for
from runs.credentials.kinds import KINDS
from runs.credentials.restrictions import (
    options_of_backend,
    read_patterns,
    refused_image,
    refused_options,
)
from runs.exceptions import InvalidRun
from runs.models import Credential
from runs.reconcile.launch import launch_replica
from runs.submit.pool_check import check_pool
from runs.submit.run_draft import PoolDraft
from tests.runs import run_harness as w
from tests.runs.launching import launched


def credential(kind: str = "kubernetes", **changes: Any) -> Credential:
    now = timezone.now()
    return Credential(name="cluster", kind=kind, created_at=now, changed_at=now, **changes)


HARMFUL = {
    "kubernetes": [
        {"service_account": "cluster-admin"},
        {"pod": {"hostNetwork": True}},
        {"pod": {"hostPID": True, "serviceAccountName": "admin"}},
        {"pod": {}},
        {"container": {"securityContext": {"privileged": True}}},
        {"container": {}},
        {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
        {"volume_mounts": [{"name": "host", "mountPath": "/host"}]},
        {"image_pull_secrets": ["other-team"]},
        {"node_selector": {"node-role.kubernetes.io/control-plane": ""}},
        {"tolerations": [{"operator": "Exists"}]},
        {"hardware": {"cpu": {"tolerations": [{"operator": "Exists"}]}}},
        {"spot": {"node_selector": {"team": "other"}}},
        {"annotations": {"iam.amazonaws.com/role": "admin"}},
        {"priority_class": "system-node-critical"},
        {"labels": {"app": "other"}},
        {"namespace": "kube-system"},
        {"an_option_of_tomorrow": 1},
    ],
    "sagemaker": [
        {"role_arn": "arn:aws:iam::1:role/admin"},
        {"subnets": ["subnet-1"]},
        {"security_group_ids": "sg-1"},
        {"kms_key_id": "k"},
        {"volume_kms_key_id": "k"},
        {"output_path": "s3://other/"},
        {"regions": ["eu-west-1"]},
    ],
    "modal": [
        {"volumes": {"/data": "other-team"}},
        {"registry_secret": "other"},
        {"environment": "production"},
        {"app": "other"},
        {"gpu": "H100:8"},
    ],
    "huggingface": [
        {"volumes": ["hf://buckets/other/private:/data"]},
        {"namespace": "other"},
        {"endpoint": "http://127.0.0.1"},
    ],
    "local": [{"gpus": "0,1"}],
}


@pytest.mark.parametrize(
    ("backend", "options"),
    [(backend, options) for backend, result in HARMFUL.items() for options in result],
)
def test_refused_unless_allowed(backend: str, options: dict[str, Any]) -> None:
    problem = refused_options(backend, credential(backend), options)
    name = next(iter(options))
    assert problem.startswith(f"expected no {name}")
    assert "in the credential cluster" in problem
    assert "ARCHIPELAGO_BACKENDS" in refused_options(backend, None, options)
    allowed = credential(backend, allowed_pool_options={name: ["*"], f"{name}.*": ["*"]})
    assert refused_options(backend, allowed, options) == ""


def test_every_option_of_every_backend_is_classified() -> None:
    """The unrestricted options are listed here: a new option is restricted until it is added."""
    assert {backend: sorted(pool_options(backend)) for backend in HARMFUL} == {
        "local": ["grace_s", "memory_mb", "nice"],
        "modal": [
            "add_python",
            "cpu",
            "extra_index_url",
            "memory_mib",
            "python_version",
            "requirements",
        ],
        "huggingface": [],
        "sagemaker": ["python", "spot_wait_s", "volume_size_gib"],
        "kubernetes": [
            "gpu_resource",
            "grace_s",
            "keep_s",
            "limits",
            "python",
            "requests",
            "shared_memory",
        ],
    }
    assert pool_options("a-backend-of-tomorrow") == frozenset()


def test_values_are_matched() -> None:
    team = credential(
        allowed_pool_options={"service_account": ["team-*"], "pod.nodeName": ["gpu-?"]}
    )
    assert refused_options("kubernetes", team, {"service_account": "team-a"}) == ""
    assert refused_options("kubernetes", team, {"service_account": "admin"})
    assert refused_options("kubernetes", team, {"service_account": "Team-a"})
    assert refused_options("kubernetes", team, {"pod": {"nodeName": "gpu-1"}}) == ""
    both = {"pod": {"nodeName": "gpu-1", "hostNetwork": True}}
    assert "pod.hostNetwork" in refused_options("kubernetes", team, both)


def test_each_item_of_a_list_needs_to_match() -> None:
    one = credential("sagemaker", allowed_pool_options={"subnets": ["subnet-a*"]})
    assert refused_options("sagemaker", one, {"subnets": ["subnet-a1", "subnet-a2"]}) == ""
    assert refused_options("sagemaker", one, {"subnets": ["subnet-a1", "subnet-b"]})


def test_pool_cannot_replace_options_of_the_credential(settings: Any) -> None:
    """Includes options that a pool can otherwise set."""
    hardened = credential(options={"limits": {"cpu": "2"}, "pod": {"hostNetwork": False}})
    assert refused_options("kubernetes", credential(), {"limits": {"cpu": "64"}}) == ""
    assert refused_options("kubernetes", hardened, {"limits": {"cpu": "64"}})
    settings.BACKEND_OPTIONS = {"local": {"memory_mb": 100}}
    assert refused_options("local", None, {"memory_mb": 10**6})
    assert refused_options("local", None, {"nice": 3}) == ""


def test_without_a_credential_the_patterns_of_the_server_apply(settings: Any) -> None:
    settings.BACKEND_OPTIONS = {
        "kubernetes": {"namespace": "ml", "allowed_pool_options": {"service_account": ["team-*"]}}
    }
    assert refused_options("kubernetes", None, {"service_account": "team-a"}) == ""
    assert refused_options("kubernetes", credential(), {"service_account": "team-a"})
    assert options_of_backend("kubernetes", None) == {"namespace": "ml"}


def test_images_are_free_unless_patterns_name_them() -> None:
    assert refused_image("kubernetes", credential(), "evil/image") == ""
    ours = credential(allowed_pool_options={"image": ["registry.example/team/*"]})
    assert refused_image("kubernetes", ours, "registry.example/team/train:1") == ""
    assert refused_image("kubernetes", ours, "evil/image")
    assert refused_image("kubernetes", ours, "") == ""


@pytest.mark.parametrize("given", [[], "x", {"a": 1}, {"a": [1]}, {"a": {"b": "c"}}])
def test_invalid_patterns_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        read_patterns(given)


@pytest.mark.django_db
def test_a_pool_is_refused_at_its_field_until_the_administrator_allows_it() -> None:
    made = credential()
    made.save()
    pool = PoolDraft(
        backend="kubernetes", credential=made.pk, options={"service_account": "team-a"}
    )
    with pytest.raises(InvalidRun) as refused:
        check_pool(pool, 2)
    assert refused.value.field == "pools.2.options"
    assert "an administrator can allow it" in refused.value.message
    Credential.objects.filter(pk=made.pk).update(
        allowed_pool_options={"service_account": ["team-*"]}
    )
    check_pool(pool, 2)


@pytest.mark.django_db
def test_stricter_patterns_block_the_launch_of_accepted_pools(
    make_run: Callable[..., Any], executor: w.FakeExecutor
) -> None:
    run = launched(make_run())
    made = credential()
    made.save()
    run.pools.update(backend="kubernetes", credential=made, options={"service_account": "admin"})
    launch_replica(run.replicas.first().pk)
    pool = run.pools.get()
    assert executor.launches == 0
    assert pool.requires_intervention
    assert "service_account" in pool.last_error


@pytest.mark.django_db
def test_credential_form_accepts_patterns() -> None:
    kind = KINDS["kubernetes"]
    form = form_for(kind)({"name": "c", "variable_KUBECONFIG": "k", ALLOWED: '{"pod.*": "x"}'})
    assert form.is_valid(), form.errors
    assert form.cleaned_data[ALLOWED] == {"pod.*": ["x"]}
    wrong = form_for(kind)({"name": "c", "variable_KUBECONFIG": "k", ALLOWED: "[1]"})
    assert "expected a JSON object" in str(wrong.errors[ALLOWED])
    assert ALLOWED not in form_for(KINDS["store-s3"]).base_fields
