"""The controllers of an emulated cluster: Jobs, quotas, and garbage collection of orphans.
Not emulated: Jobs of more than one completion.

The rules and their sources:

- a suspended Job has no pods, and its start time and deadline are reset when it is resumed
  (https://kubernetes.io/docs/concepts/workloads/controllers/job/#suspending-a-job);
- ``parallelism`` 0 pauses a Job: it gets no pods (.../job/#controlling-parallelism);
- an ended Job is deleted after its ``ttlSecondsAfterFinished``
  (https://kubernetes.io/docs/concepts/workloads/controllers/ttlafterfinished/);
- a ResourceQuota counts objects when they are created, and the requests of pods that have not ended
  (https://kubernetes.io/docs/concepts/policy/resource-quotas/);
- a client ignores unknown conditions: every Job here has one
  (https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md#typical-status-properties).

The order of steps is that of ``pkg/controller/job`` of Kubernetes 1.33: a Job past its deadline is
first marked (FailureTarget), its pods are ended, and when they are gone it is Failed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from decimal import Decimal

from tests.emulators.kubernetes_kubelet import Kubelet, phase, state_of
from tests.emulators.kubernetes_kueue import Kueue
from tests.emulators.kubernetes_objects import Json, Objects, timestamp, unix_seconds

_ENDS = ("Complete", "Failed")
NEW_CONDITION = {"type": "EmulatedNewCondition", "status": "True", "reason": "New", "message": ""}


class Controllers:
    """The controllers of ``objects``; :meth:`step` runs each once."""

    def __init__(self, objects: Objects, kubelet: Kubelet) -> None:
        self.objects = objects
        self.kubelet = kubelet
        self.kueue = Kueue(objects)
        objects.update_checks.append(self.kueue.validate)

    def step(self) -> None:
        with self.objects.changed:
            for resource, made in self.objects.orphans():
                if resource == "pods":
                    self.kubelet.delete(made)
                    self.kubelet.account(made)
                else:
                    meta = made["metadata"]
                    self.objects.remove(resource, meta["namespace"], meta["name"])
            for resource, made, dependents in self.objects.in_foreground_deletion():
                meta = made["metadata"]
                if not dependents:
                    self.objects.remove(resource, meta["namespace"], meta["name"])
                for kind, each in dependents:
                    if kind == "pods":
                        self.kubelet.delete(each)
                        self.kubelet.account(each)
                    else:
                        of = each["metadata"]
                        self.objects.remove(kind, of["namespace"], of["name"])
            jobs = self.objects.all("jobs")
            self.kueue.forget_missing({job["metadata"]["uid"] for job in jobs})
            for job in jobs:
                if "deletionTimestamp" not in job["metadata"]:
                    self._job(job)
            for pod in self.objects.all("pods"):
                self.kubelet.step(pod)

    def _job(self, job: Json) -> None:
        status = job.setdefault("status", {"conditions": [dict(NEW_CONDITION)], "emulatedNew": {}})
        spec, pods, now = job["spec"], self.objects.owned("pods", job), time.time()
        end = next((c for c in status.get("conditions", ()) if c["type"] in _ENDS), None)
        self.kueue.step(job, has_ended=end is not None)
        if end is not None:
            for pod in pods:
                self.kubelet.account(pod)
            kept_s = spec.get("ttlSecondsAfterFinished")
            if kept_s is not None and now >= unix_seconds(end["lastTransitionTime"]) + kept_s:
                meta = job["metadata"]
                self.objects.remove("jobs", meta["namespace"], meta["name"])
            return
        if spec.get("suspend"):
            if status.pop("startTime", None) is not None:
                self.objects.change(job)
            for pod in pods:
                self.kubelet.delete(pod)
                self.kubelet.account(pod)
            return
        if "startTime" not in status:
            status["startTime"] = timestamp(now)
            self.objects.change(job)
        target = next(
            (c for c in status.get("conditions", ()) if c["type"] == "FailureTarget"), None
        )
        limit_s = spec.get("activeDeadlineSeconds")
        late_s = now - unix_seconds(status["startTime"])
        if target is None and limit_s is not None and late_s >= limit_s:
            message = "Job was active longer than specified deadline"
            target = self._condition(job, "FailureTarget", "DeadlineExceeded", message)
        if target is not None:
            for pod in pods:
                self.kubelet.delete(pod)
                self.kubelet.account(pod)
            if not self.objects.owned("pods", job):
                self._condition(job, "Failed", target["reason"], target["message"])
            return
        over = next((pod for pod in pods if phase(pod) in ("Succeeded", "Failed")), None)
        if over is None and not pods and spec.get("parallelism", 1) > 0:
            self._make_pod(job)
        elif over is not None:
            self._finish(job, over)

    def _finish(self, job: Json, pod: Json) -> None:
        status = job["status"]
        if phase(pod) == "Succeeded":
            status |= {"succeeded": 1, "completionTime": timestamp(time.time())}
            self._condition(
                job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
            )
        else:
            status["failed"] = 1
            message = _failure_policy(job, pod)
            if message:
                self._condition(job, "Failed", "PodFailurePolicy", message)
            else:
                message = "Job has reached the specified backoff limit"
                self._condition(job, "Failed", "BackoffLimitExceeded", message)
        self.kubelet.account(pod)

    def _condition(self, job: Json, kind: str, reason: str, message: str) -> Json:
        made = {"type": kind, "status": "True", "reason": reason, "message": message}
        made |= {"lastTransitionTime": timestamp(time.time())}
        job["status"].setdefault("conditions", []).append(made)
        self.objects.change(job)
        return made

    def _make_pod(self, job: Json) -> None:
        meta, template = job["metadata"], job["spec"]["template"]
        name = f"{meta['name'][:57]}-{uuid.uuid4().hex[:5]}"
        pod = {
            "metadata": {
                "name": name,
                "labels": {
                    **((template.get("metadata") or {}).get("labels") or {}),
                    "batch.kubernetes.io/job-name": meta["name"],
                    "job-name": meta["name"],
                    "batch.kubernetes.io/controller-uid": meta["uid"],
                },
                "annotations": (template.get("metadata") or {}).get("annotations") or {},
                "ownerReferences": [
                    {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"]}
                    | {"uid": meta["uid"], "controller": True}
                ],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        refused = self.over_quota(meta["namespace"], "pods", pod["spec"])
        if refused:
            self.objects.warn(
                job, "FailedCreate", f'Error creating: pods "{name}" is forbidden: {refused}'
            )
            return
        self.objects.create("pods", meta["namespace"], pod)

    def over_quota(self, namespace: str, what: str, pod: Json) -> str:
        """The message of the quota that one more object of kind ``what`` exceeds; empty if none."""
        needs: dict[str, Decimal] = {f"count/{what}": Decimal(1)}
        if what == "secrets":
            needs["secrets"] = Decimal(1)
        if what == "pods":
            needs |= {"pods": Decimal(1)} | _requests(pod)
        for quota in self.objects.all("resourcequotas", namespace):
            hard, used = quota["spec"]["hard"], self.used(namespace, quota["spec"]["hard"])
            for name, need in needs.items():
                if name in hard and quantity(hard[name]) < used[name] + need:
                    return (
                        f"exceeded quota: {quota['metadata']['name']}, requested: {name}={need}, "
                        f"used: {name}={used[name]}, limited: {name}={hard[name]}"
                    )
        return ""

    def used(self, namespace: str, names: Collection[str]) -> dict[str, Decimal]:
        """Usage that counts against a quota: objects, and devices of pods that have not ended."""
        active = [
            pod
            for pod in self.objects.all("pods", namespace)
            if phase(pod) not in ("Succeeded", "Failed")
        ]
        usage = {}
        for name in names:
            if name in ("pods", "count/pods"):
                usage[name] = Decimal(len(active))
            elif name.startswith(("requests.", "limits.")) or name in ("cpu", "memory"):
                each = (_requests(pod["spec"]).get(name, Decimal(0)) for pod in active)
                usage[name] = sum(each, Decimal(0))
            else:
                kind = name.removeprefix("count/").partition(".")[0]
                usage[name] = Decimal(len(self.objects.all(kind, namespace)))
        return usage


def _requests(pod: Json) -> dict[str, Decimal]:
    """Usage of one pod, by the names of quotas; a limit counts as a request too."""
    resources = pod["containers"][0].get("resources") or {}
    limits = resources.get("limits") or {}
    usage = {}
    for name, amount in {**limits, **(resources.get("requests") or {})}.items():
        usage[f"requests.{name}"] = usage[name] = quantity(amount)
    return usage | {f"limits.{name}": quantity(amount) for name, amount in limits.items()}


def quantity(text: str) -> Decimal:
    """https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
    for suffix, power in _SUFFIXES.items():
        if text.endswith(suffix):
            return Decimal(text.removesuffix(suffix)) * power
    return Decimal(text)


_SUFFIXES = {
    **{f"{each}i": Decimal(1024) ** n for n, each in enumerate("KMGTP", 1)},
    **{each: Decimal(1000) ** n for n, each in enumerate("kMGTP", 1)},
    "m": Decimal("0.001"),
}


def has_ended(job: Json) -> bool:
    return any(each["type"] in _ENDS for each in (job.get("status") or {}).get("conditions", ()))


def _failure_policy(job: Json, pod: Json) -> str:
    """The message of the first matching rule; empty if none matches."""
    where = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    exit_code = (state_of(pod).get("terminated") or {}).get("exitCode", 0)
    for n, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules") or ()):
        for pattern in rule.get("onPodConditions") or ():
            for condition in pod["status"].get("conditions") or ():
                if condition.items() >= pattern.items():
                    return f"Pod {where} has condition {pattern['type']} matching " + (
                        f"{rule['action']} rule at index {n}"
                    )
        codes = rule.get("onExitCodes")
        if codes and exit_code and (exit_code in codes["values"]) is (codes["operator"] == "In"):
            return (
                f"Container {pod['spec']['containers'][0]['name']} for pod {where} failed with "
                + (f"exit code {exit_code} matching {rule['action']} rule at index {n}")
            )
    return ""
