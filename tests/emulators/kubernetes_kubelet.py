"""The scheduler and the kubelet of an emulated cluster.

A pod runs as a process of this machine (:mod:`tests.emulators.processes`); conditions, reasons and
messages are those of Kubernetes 1.33.

The rules and their sources:

- a container starts only when the Secrets that it names exist; until then it waits in
  ``CreateContainerConfigError`` and is retried
  (https://kubernetes.io/docs/concepts/configuration/secret/#restriction-secret-must-exist);
- an image that cannot be pulled is ``ErrImagePull`` once, then ``ImagePullBackOff``, and
  retried; an invalid name is ``InvalidImageName``
  (https://kubernetes.io/docs/concepts/containers/images/#imagepullbackoff);
- a pod that fits no node is ``Unschedulable`` and starts when one has room
  (https://kubernetes.io/docs/concepts/scheduling-eviction/kube-scheduler/).

Not emulated: images (every name is valid unless it is in ``missing_images``), volumes, limits on
memory or devices, and more than one container.
"""

from __future__ import annotations

import base64
import contextlib
import re
import time
from collections.abc import Mapping
from pathlib import Path

from tests.emulators.kubernetes_objects import Json, Objects, Refused, timestamp
from tests.emulators.processes import Job as Process
from tests.emulators.processes import Processes

LAST_LINES = 80
LAST_BYTES = 2048

_IMAGE = re.compile(r"[a-z0-9]+([._/:@-]+[A-Za-z0-9]+)*")
_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z][-._a-zA-Z0-9]*)\))")


class Kubelet:
    """Runs the pods of ``objects``. ``missing_images`` cannot be pulled."""

    def __init__(self, objects: Objects, root: Path) -> None:
        self.objects = objects
        self.processes = Processes(root)
        self.missing_images: set[str] = set()

    def delete(self, pod: Json, *, grace_s: float | None = None) -> None:
        """End a pod with its grace period. It is removed after its end, once its Job has recorded
        it."""
        meta = pod["metadata"]
        if "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = timestamp(time.time())
            self.objects.change(pod)
        if grace_s is None:
            grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        with contextlib.suppress(KeyError):
            self.processes.kill(meta["uid"], grace_s=grace_s)

    def disrupt(self, pod: Json, reason: str, message: str) -> None:
        """Disrupt a pod: its node is lost, or a pod of higher priority needs the room."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
        pod["status"].setdefault("conditions", []).append(condition | {"message": message})
        self.delete(pod)

    def account(self, pod: Json) -> None:
        """Record that the Job has seen the pod's end; a deleted pod is then removed."""
        if "deletionTimestamp" in pod["metadata"] and phase(pod) in ("Succeeded", "Failed"):
            self.forget(pod)

    def forget(self, pod: Json) -> None:
        """Remove a pod at once, with its process and its log."""
        meta = pod["metadata"]
        self.objects.remove("pods", meta["namespace"], meta["name"])
        with contextlib.suppress(KeyError):
            self.processes.forget(meta["uid"])

    def step(self, pod: Json) -> None:
        """Advance a pod to its next state."""
        status = pod["status"]
        if status["phase"] in ("Succeeded", "Failed"):
            return
        try:
            process = self.processes.get(pod["metadata"]["uid"])
        except KeyError:
            if "deletionTimestamp" in pod["metadata"]:
                status["phase"] = "Failed"
                self.objects.change(pod)
            elif "nodeName" in pod["spec"] or self._schedule(pod):
                self._start(pod)
            return
        if process.state == "ended":
            self._ended(pod, process)

    def _schedule(self, pod: Json) -> bool:
        nodes = self.objects.all("nodes")
        for node in nodes:
            if _fits(node, pod) and self._has_room(node, pod):
                pod["spec"]["nodeName"] = node["metadata"]["name"]
                scheduled = {"type": "PodScheduled", "status": "True"}
                pod["status"] |= {"conditions": [scheduled], "startTime": timestamp(time.time())}
                self._waiting(pod, "ContainerCreating", "")
                return True
        fit = sum(_fits(node, pod) for node in nodes)
        why = f"{len(nodes) - fit} node(s) didn't match Pod's node affinity/selector or taints"
        if fit:
            device = next(iter(devices(pod["spec"])), "cpu")
            why = f"{fit} Insufficient {device}"
        message = f"0/{len(nodes)} nodes are available: {why}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        if pod["status"].get("conditions") != [condition | {"message": message}]:
            pod["status"]["conditions"] = [condition | {"message": message}]
            self.objects.change(pod)
            self.objects.warn(pod, "FailedScheduling", message)
        return False

    def _has_room(self, node: Json, pod: Json) -> bool:
        there = [
            other
            for other in self.objects.all("pods")
            if other["spec"].get("nodeName") == node["metadata"]["name"]
            and phase(other) not in ("Succeeded", "Failed")
        ]
        allocatable = node["status"]["allocatable"]
        return all(
            sum(devices(other["spec"]).get(name, 0) for other in there) + need
            <= int(allocatable.get(name, "0"))
            for name, need in devices(pod["spec"]).items()
        )

    def _start(self, pod: Json) -> None:
        container = pod["spec"]["containers"][0]
        image = container["image"]
        if not _IMAGE.fullmatch(image):
            message = f'Failed to apply default image tag "{image}": couldn\'t parse image name'
            self._waiting(pod, "InvalidImageName", f"{message}: invalid reference format")
            return
        if image in self.missing_images:
            if not state_of(pod).get("waiting", {}).get("reason", "").endswith(("Pull", "BackOff")):
                message = f'failed to pull and unpack image "{image}": {image}: not found'
                self._waiting(pod, "ErrImagePull", message)
                return
            message = f'Back-off pulling image "{image}": ErrImagePull: {image}: not found'
            self._waiting(pod, "ImagePullBackOff", message)
            self.objects.warn(pod, "Failed", f'Failed to pull image "{image}": {image}: not found')
            return
        try:
            env = self._environment(pod, container)
        except Refused as missing:
            message = missing.message.replace("secrets ", "secret ")
            self._waiting(pod, "CreateContainerConfigError", message)
            self.objects.warn(pod, "Failed", f"Error: {message}")
            return
        line = [_expanded(part, env) for part in container.get("command") or ()]
        line += [_expanded(part, env) for part in container.get("args") or ()]
        process = self.processes.start(
            line,
            env,
            timeout_s=pod["spec"].get("activeDeadlineSeconds"),
            grace_s=pod["spec"].get("terminationGracePeriodSeconds", 30),
            job_id=pod["metadata"]["uid"],
        )
        began = {"startedAt": timestamp(process.started_wall_s)}
        pod["status"]["phase"] = "Running"
        self._container(pod, {"running": began}, ready=True)

    def _environment(self, pod: Json, container: Json) -> dict[str, str]:
        env: dict[str, str] = {}
        for variable in container.get("env") or ():
            reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
            if reference is None:
                env[variable["name"]] = _expanded(variable.get("value", ""), env)
                continue
            namespace = pod["metadata"]["namespace"]
            held = self.objects.get("secrets", namespace, reference["name"]).get("data") or {}
            if reference["key"] not in held:
                raise Refused(404, "NotFound", f"couldn't find key {reference['key']} in Secret")
            env[variable["name"]] = base64.b64decode(held[reference["key"]]).decode()
        return env

    def _waiting(self, pod: Json, reason: str, message: str) -> None:
        waiting = {"reason": reason} | ({"message": message} if message else {})
        if state_of(pod) != {"waiting": waiting}:
            self._container(pod, {"waiting": waiting})

    def _ended(self, pod: Json, process: Process) -> None:
        status, failed = pod["status"], process.exit_code != 0
        terminated: Json = {
            "exitCode": process.exit_code,
            "reason": "Error" if failed else "Completed",
            "startedAt": timestamp(process.started_wall_s),
            "finishedAt": timestamp(process.ended_wall_s),
        }
        if process.ended_by == "oom":
            terminated["reason"] = "OOMKilled"
        policy = pod["spec"]["containers"][0].get("terminationMessagePolicy")
        if failed and policy == "FallbackToLogsOnError":
            lines = self.processes.log_lines(process.id)[-LAST_LINES:]
            message = "".join(f"{text}\n" for _, _, text in lines)
            terminated["message"] = message.encode()[-LAST_BYTES:].decode(errors="ignore")
        if process.ended_by == "deadline":
            status["reason"] = "DeadlineExceeded"
            status["message"] = "Pod was active on the node longer than the specified deadline"
        status["phase"] = "Failed" if failed or process.ended_by == "deadline" else "Succeeded"
        self._container(pod, {"terminated": terminated})

    def _container(self, pod: Json, state: Json, *, ready: bool = False) -> None:
        container = pod["spec"]["containers"][0]
        pod["status"]["containerStatuses"] = [
            {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready}
            | {"restartCount": 0, "state": state}
        ]
        self.objects.change(pod)


def phase(pod: Json) -> str:
    return str(pod["status"]["phase"])


def state_of(pod: Json) -> Json:
    """The state of the pod's container."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    return dict(statuses[0].get("state") or {})


def _fits(node: Json, pod: Json) -> bool:
    """Whether a node matches by selector, affinity and taints, regardless of free capacity."""
    labels = node["metadata"].get("labels") or {}
    spec = pod["spec"]
    if not (spec.get("nodeSelector") or {}).items() <= labels.items():
        return False
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if affinity and not any(
        all(labels.get(match["key"]) in match["values"] for match in term["matchExpressions"])
        for term in affinity["nodeSelectorTerms"]
    ):
        return False
    return all(
        any(
            toleration.get("key") == taint["key"]
            and (
                toleration.get("operator") == "Exists" or toleration.get("value") == taint["value"]
            )
            for toleration in spec.get("tolerations") or ()
        )
        for taint in (node.get("spec") or {}).get("taints") or ()
    )


def devices(spec: Json) -> dict[str, int]:
    """Devices that a pod requests: resources with a domain in their name."""
    limits = (spec["containers"][0].get("resources") or {}).get("limits") or {}
    return {name: int(count) for name, count in limits.items() if "/" in name}


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` to the variable, if it exists, and ``$$`` to ``$``."""
    return _REFERENCE.sub(
        lambda match: "$" if match[1] == "$" else env.get(match[2], match[0]), text
    )
