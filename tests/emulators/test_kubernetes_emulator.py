"""The emulated cluster enforces the rules of a real one; its docstrings name the sources."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.emulators.interruptions import Interruption, Interruptions, Outcome
from tests.emulators.kubernetes import TOKEN, KubernetesCluster
from tests.emulators.kubernetes_jobs import NEW_CONDITION
from tests.emulators.kubernetes_kueue import QUEUE_LABEL
from tests.emulators.kubernetes_objects import Objects
from tests.executors.harnesses import wait_for

pytestmark = pytest.mark.processes

Json = dict[str, Any]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with KubernetesCluster(tmp_path) as opened:
        yield opened


def request(
    cluster: KubernetesCluster, method: str, path: str, body: Json | None = None
) -> tuple[int, Json, dict[str, str]]:
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    requested = urllib.request.Request(
        cluster.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": kind},
    )
    try:
        with urllib.request.urlopen(requested) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), dict(error.headers)


JOBS = "/apis/batch/v1/namespaces/default/jobs"
SECRETS = "/api/v1/namespaces/default/secrets"


def job(name: str = "a", *, metadata: Json | None = None, **spec: Any) -> Json:
    container = {"name": "replica", "image": "x:1", "command": ["sleep", "60"]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {"metadata": {"name": name, **(metadata or {})}, "spec": {"template": template, **spec}}


def owned(name: str, owner: Json) -> Json:
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "a"}
    reference["uid"] = owner["metadata"]["uid"]
    return {"metadata": {"name": name, "ownerReferences": [reference]}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (job("A"), "lowercase RFC 1123 subdomain"),
        (job("a" * 64), "must be no more than 63"),
        (job(metadata={"labels": {"team": "not a label"}}), "a valid label must be"),
        (job(metadata={"labels": {"-team": "x"}}), "name part must consist"),
        (job(metadata={"annotations": {"a b": "x"}}), "name part must consist"),
        (job(metadata={"annotations": {"a": "x" * 300_000}}), "Too long"),
        (job(metadata={"ownerReferences": [{"name": "x"}]}), "must not be empty"),
        (job(parallelism=-1), "greater than or equal to 0"),
    ],
)
def test_an_object_that_is_invalid_is_refused(
    cluster: KubernetesCluster, given: Json, message: str
) -> None:
    code, answer, _ = request(cluster, "POST", JOBS, given)
    assert code == 422 and message in answer["message"]


def test_an_unknown_field_is_refused_with_strict_validation_only(
    cluster: KubernetesCluster,
) -> None:
    given = job(suspnd=True)
    code, answer, _ = request(cluster, "POST", f"{JOBS}?fieldValidation=Strict", given)
    assert code == 400
    assert answer["message"] == 'strict decoding error: unknown field "spec.suspnd"'
    assert request(cluster, "POST", JOBS, given)[0] == 201


def test_names_namespaces_and_versions_conflict(cluster: KubernetesCluster) -> None:
    made = request(cluster, "POST", JOBS, job(suspend=True))[1]
    assert request(cluster, "POST", JOBS, job())[1]["reason"] == "AlreadyExists"
    elsewhere = JOBS.replace("default", "nowhere")
    assert request(cluster, "POST", elsewhere, job())[:1] == (404,)
    patch = {"metadata": {"resourceVersion": "0"}, "spec": {"parallelism": 0}}
    assert request(cluster, "PATCH", f"{JOBS}/a", patch)[1]["reason"] == "Conflict"
    assert request(cluster, "GET", f"{JOBS}/a")[1]["spec"]["suspend"] is True
    assert made["metadata"]["resourceVersion"]


def test_the_template_of_a_job_is_immutable_except_scheduling_before_its_start(
    cluster: KubernetesCluster,
) -> None:
    request(cluster, "POST", JOBS, job(suspend=True, completions=1))
    changed = [
        ({"completions": 2}, 422),
        ({"template": {"spec": {"containers": []}}}, 422),
        ({"template": {"spec": {"nodeSelector": {"zone": "b"}}}}, 200),
        ({"suspend": True, "activeDeadlineSeconds": 5, "parallelism": 0}, 200),
        ({"completions": 1}, 200),
    ]
    for spec, code in changed:
        assert request(cluster, "PATCH", f"{JOBS}/a", {"spec": spec})[0] == code, spec


def test_an_immutable_secret_keeps_its_data(cluster: KubernetesCluster) -> None:
    given = {"metadata": {"name": "s"}, "immutable": True, "data": {"A": "eA=="}}
    request(cluster, "POST", SECRETS, given)
    for patch in ({"data": {"A": "eQ=="}}, {"immutable": None}):
        assert request(cluster, "PATCH", f"{SECRETS}/s", patch)[0] == 422
    labelled = {"metadata": {"labels": {"team": "blue"}}}
    assert request(cluster, "PATCH", f"{SECRETS}/s", labelled)[0] == 200


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_dependents_are_deleted_with_their_owner(cluster: KubernetesCluster, policy: str) -> None:
    made = request(cluster, "POST", JOBS, job())[1]
    request(cluster, "POST", SECRETS, owned("s", made))
    wait_for(lambda: cluster.objects.all("pods"), "a pod")
    request(cluster, "DELETE", f"{JOBS}/a", {"propagationPolicy": policy})
    if policy == "Background":
        assert cluster.objects.all("jobs") == []
    for resource in ("secrets", "pods", "jobs"):
        wait_for(lambda of=resource: not cluster.objects.all(of), f"{resource} to go")


def test_dependents_can_be_orphaned_and_one_of_a_missing_owner_is_deleted(
    cluster: KubernetesCluster,
) -> None:
    made = request(cluster, "POST", JOBS, job(suspend=True))[1]
    request(cluster, "POST", SECRETS, owned("kept", made))
    request(cluster, "DELETE", f"{JOBS}/a", {"propagationPolicy": "Orphan"})
    request(cluster, "POST", SECRETS, owned("lost", made))
    wait_for(lambda: len(cluster.objects.all("secrets")) == 1, "the other to go")
    assert cluster.unowned_secrets() == ["kept"]
    assert request(cluster, "DELETE", f"{SECRETS}/kept", {"propagationPolicy": "No"})[0] == 422


def test_a_suspended_job_has_no_pods_and_its_deadline_restarts(
    cluster: KubernetesCluster,
) -> None:
    request(cluster, "POST", JOBS, job())
    wait_for(lambda: cluster.pods("a"), "a pod")
    request(cluster, "PATCH", f"{JOBS}/a", {"spec": {"suspend": True}})
    wait_for(lambda: not cluster.pods("a"), "the pod to go")
    wait_for(lambda: "startTime" not in cluster.job("a")["status"], "the start time to be reset")
    request(cluster, "PATCH", f"{JOBS}/a", {"spec": {"suspend": False, "parallelism": 0}})
    wait_for(lambda: "startTime" in cluster.job("a")["status"], "it to be resumed")
    assert cluster.pods("a") == []
    assert NEW_CONDITION in cluster.job("a")["status"]["conditions"]


def test_a_quota_counts_what_pods_request(cluster: KubernetesCluster) -> None:
    cluster.add_quota("memory", {"requests.memory": "1Gi", "count/secrets": "0"})
    given = job()
    container = given["spec"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"memory": "1025Mi"}}
    assert request(cluster, "POST", JOBS, given)[0] == 201, "it counts pods, not Jobs"
    wait_for(lambda: cluster.objects.all("events"), "a warning")
    (event,) = cluster.objects.all("events")
    assert event["reason"] == "FailedCreate" and "exceeded quota: memory" in event["message"]
    code, answer, _ = request(cluster, "POST", SECRETS, {"metadata": {"name": "s"}})
    assert code == 403 and "limited: count/secrets=0" in answer["message"]


def test_a_queue_holds_its_jobs_and_keeps_its_label(cluster: KubernetesCluster) -> None:
    cluster.add_queue("research", 1)
    labels = {"labels": {QUEUE_LABEL: "research"}}
    for name in "ab":
        request(cluster, "POST", JOBS, job(name, metadata=labels, suspend=False))
    wait_for(lambda: cluster.pods("a"), "the first to be admitted")
    assert cluster.job("b")["spec"]["suspend"] is True and cluster.pods("b") == []
    out = {"metadata": {"labels": {QUEUE_LABEL: None}}}
    assert request(cluster, "PATCH", f"{JOBS}/a", out)[0] == 422, "its quota is reserved"
    resumed = {"spec": {"suspend": False}}
    request(cluster, "PATCH", f"{JOBS}/b", resumed)
    wait_for(lambda: cluster.job("b")["spec"]["suspend"], "it to be suspended again")
    assert request(cluster, "PATCH", f"{JOBS}/b", out)[0] == 200
    request(cluster, "PATCH", f"{JOBS}/b", resumed)
    wait_for(lambda: cluster.pods("b"), "one that left its queue to run")


@pytest.mark.parametrize("after", [7, "Thu, 01 Jan 2099 00:00:00 GMT"])
def test_retry_after_is_sent_in_either_form(cluster: KubernetesCluster, after: int | str) -> None:
    cluster.fail(429, "too many requests", after_s=after)
    code, _, headers = request(cluster, "GET", JOBS)
    assert (code, headers["Retry-After"]) == (429, str(after))


def test_a_created_object_is_copied_while_nothing_changes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects, copied_under_lock = Objects(("default",)), []

    def copied(value: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            free = other.submit(objects.changed.acquire, blocking=False).result()
            if free:
                other.submit(objects.changed.release).result()
        copied_under_lock.append(not free)
        return value

    monkeypatch.setattr("tests.emulators.kubernetes_objects.copy.deepcopy", copied)
    objects.create("secrets", "default", {"metadata": {"name": "a"}, "stringData": {"b": "c"}})
    assert copied_under_lock[-1]


def test_one_request_is_interrupted_and_a_dead_client_sends_no_more() -> None:
    interruptions = Interruptions()
    expected = {
        Interruption.REFUSED: [Outcome.PROCEED, Outcome.REFUSE, Outcome.PROCEED],
        Interruption.LOST: [Outcome.PROCEED, Outcome.PROCEED, Outcome.PROCEED],
        Interruption.KILLED_BEFORE: [Outcome.PROCEED, Outcome.DROP, Outcome.DROP],
        Interruption.KILLED_AFTER: [Outcome.PROCEED, Outcome.PROCEED, Outcome.DROP],
    }
    for how, outcomes in expected.items():
        interruptions.interrupt(1, how)
        seen = []
        for number in range(3):
            seen.append(interruptions.before())
            lost = number == 1 and how in (Interruption.LOST, Interruption.KILLED_AFTER)
            assert (interruptions.after() is Outcome.DROP) is lost
        assert seen == outcomes
        assert interruptions.restore() == 3
