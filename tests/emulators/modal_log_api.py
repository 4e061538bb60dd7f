"""The part of Modal's API that reads logs: counts of entries, and the entries of a time range.

All output of a job is on its standard output.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from modal_proto import api_pb2 as api

from tests.emulators.processes import Processes


class ModalLogApi:
    """Log requests, for :class:`tests.emulators.modal_api.ModalApi`, which maps tasks to jobs."""

    processes: Processes

    def job_of_task(self, task_id: str) -> str | None:
        """The job of a task id; None if there is none."""
        raise NotImplementedError

    def AppCountLogs(self, request: Any) -> Message:
        width = request.bucket_secs
        counts: dict[int, int] = {}
        for item in self._entries(request):
            counts[int(item.timestamp // width)] = counts.get(int(item.timestamp // width), 0) + 1
        buckets = range(min(counts, default=0), max(counts, default=-1) + 1)
        return api.AppCountLogsResponse(
            app_id=request.app_id,
            buckets=[
                api.AppCountLogsResponse.LogBucket(
                    bucket_start_at=Timestamp(seconds=n * width), stdout_logs=counts.get(n, 0)
                )
                for n in buckets
            ],
        )

    def AppFetchLogs(self, request: Any) -> Message:
        items = self._entries(request)[: request.limit]
        batch = api.TaskLogsBatch(task_id=request.task_id, items=items)
        return api.AppFetchLogsResponse(batches=[batch] if items else [])

    def _entries(self, request: Any) -> list[api.TaskLogs]:
        """Entries of a job's log in the requested time range. An entry is not a line: every third
        line is split in two."""
        job = self.job_of_task(request.task_id)
        entries = []
        for number, wall_s, text in self.processes.log_lines(job) if job else ():
            nanos = int(wall_s * 1e9)
            if not request.since.ToNanoseconds() <= nanos < request.until.ToNanoseconds():
                continue
            cut = len(text) // 2 if number % 3 == 0 else 0
            entries += [
                api.TaskLogs(
                    data=part,
                    timestamp=nanos / 1e9,
                    timestamp_ns=nanos,
                    file_descriptor=api.FILE_DESCRIPTOR_STDOUT,
                )
                for part in (text[:cut], text[cut:] + "\n")
                if part
            ]
        return entries
