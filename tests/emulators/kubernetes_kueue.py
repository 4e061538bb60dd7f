"""Kueue in an emulated cluster: Jobs and LocalQueues.

Each rule comes from https://kueue.sigs.k8s.io/docs/tasks/run/jobs/ unless it names another page:

- a Job with the label ``kueue.x-k8s.io/queue-name`` is suspended when it is created, regardless
  of its spec, and resumed when its queue has quota for it;
- the label can be changed or removed only while the Job is suspended and has no quota reserved;
- a Job that is resumed without an admission is suspended again;
- a Job whose queue does not exist stays suspended
  (https://kueue.sigs.k8s.io/docs/concepts/local_queue/);
- a Job that is preempted is suspended: its pods are ended, and it waits for its next admission
  (https://kueue.sigs.k8s.io/docs/concepts/preemption/).

Not emulated: Workload objects, flavors, cohorts, priorities and partial admission. A queue's quota
is a number of Jobs.
"""

from __future__ import annotations

from tests.emulators.kubernetes_objects import Json, Objects, Refused

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


class Kueue:
    """Queues by name, each with the number of Jobs it admits at once."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.queues: dict[str, int] = {}
        self.installed = False
        self.checks_pending = False
        """Quota is reserved, but AdmissionChecks have not passed: Jobs stay suspended
        (https://kueue.sigs.k8s.io/docs/concepts/admission_check/)."""
        self._admitted: dict[str, str] = {}
        """uid of a Job -> its queue."""

    def add_queue(self, name: str, quota: int) -> None:
        self.queues[name] = quota
        self.installed = True

    def mutate(self, job: Json) -> None:
        """The webhook for create requests."""
        if self.installed and queue_of(job):
            job["spec"]["suspend"] = True

    def validate(self, old: Json, new: Json) -> None:
        """The webhook for updates. Raises :class:`Refused`."""
        if not self.installed or queue_of(old) == queue_of(new):
            return
        reserved = old["metadata"]["uid"] in self._admitted
        if reserved or not new["spec"].get("suspend"):
            raise Refused(
                422,
                "Invalid",
                f'admission webhook "vjob.kb.io" denied the request: metadata.labels'
                f"[{QUEUE_LABEL}]: Invalid value: {queue_of(new)!r}: field is immutable",
            )

    def evict(self, job: Json) -> None:
        """Preempt an admitted Job for another workload."""
        self._admitted.pop(job["metadata"]["uid"], None)
        job["spec"]["suspend"] = True
        self.objects.change(job)

    def step(self, job: Json, *, has_ended: bool) -> None:
        """Admit, resume or suspend one Job."""
        uid, queue = job["metadata"]["uid"], queue_of(job)
        if not self.installed:
            return
        if has_ended or not queue:
            self._admitted.pop(uid, None)
            return
        if uid not in self._admitted:
            used = sum(each == queue for each in self._admitted.values())
            needs = 1 if job["spec"].get("parallelism", 1) else 0
            if used + needs <= self.queues.get(queue, -1):
                self._admitted[uid] = queue
        suspend = uid not in self._admitted or self.checks_pending
        if bool(job["spec"].get("suspend")) != suspend:
            job["spec"]["suspend"] = suspend
            self.objects.change(job)

    def forget_missing(self, uids: set[str]) -> None:
        """Release the quota of Jobs that are gone."""
        for uid in set(self._admitted) - uids:
            del self._admitted[uid]


def queue_of(job: Json) -> str:
    return str((job["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))
