"""Read a training job's output from CloudWatch Logs.

SageMaker writes one stream per start of the container, ``<job>/algo-1-<time>``, in the group
:data:`GROUP`, some seconds after the output. Pages are read by ``nextForwardToken``; an unchanged
token marks the current end
(docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetLogEvents.html). Tokens expire
after a day and belong to pages, so the position of a line is its stream, its time, and its number
among the lines of that millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from botocore.exceptions import ClientError

from executors.base import LogLine
from executors.sagemaker.client import aws_errors, code_of

GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position after line number ``count`` of millisecond ``at_ms`` in ``stream``; the start of
    the stream if both are 0. Streams are ordered by name."""

    stream: str = ""
    at_ms: int = 0
    count: int = 0

    @classmethod
    def read(cls, text: str) -> Position:
        """Parse the position of a :class:`LogLine`. Raises :class:`ValueError`."""
        if not text:
            return cls()
        # The name of a stream has no colon (API_GetLogEvents).
        stream, _, rest = text.partition(":")
        at_ms, _, count = rest.partition(":")
        if not (stream and at_ms.isdecimal() and count.isdecimal()):
            raise ValueError(f"after: expected the position of a line, found {text!r}")
        return cls(stream=stream, at_ms=int(at_ms), count=int(count))

    def __str__(self) -> str:
        return f"{self.stream}:{self.at_ms}:{self.count}"


class Tail:
    """A reader that continues where its previous read ended."""

    def __init__(self, client: Any, job_name: str, after: str) -> None:
        self._client = client
        self._job_name = job_name
        self._at = Position.read(after)
        self._token = ""

    def lines(self) -> Iterator[LogLine]:
        """Lines that arrived since the previous read."""
        for stream in self._streams():
            if stream != self._at.stream:
                self._at, self._token = Position(stream=stream), ""
            yield from self._of_stream()

    def _streams(self) -> list[str]:
        """Streams with unread lines: a stream is complete once there is a later one."""
        with aws_errors():
            try:
                pages = self._client.get_paginator("describe_log_streams").paginate(
                    logGroupName=GROUP, logStreamNamePrefix=f"{self._job_name}/"
                )
                names = sorted(s["logStreamName"] for page in pages for s in page["logStreams"])
            except ClientError as error:
                if code_of(error) == "ResourceNotFoundException":  # no job has written to the group
                    return []
                raise
        return [name for name in names if name >= self._at.stream]

    def _of_stream(self) -> Iterator[LogLine]:
        # Without a token, start at the millisecond of the last line and skip the lines already
        # read.
        first_ms, skip = self._at.at_ms, 0 if self._token else self._at.count
        while True:
            since = {"nextToken": self._token} if self._token else {"startTime": self._at.at_ms}
            with aws_errors():
                page = self._client.get_log_events(
                    logGroupName=GROUP,
                    logStreamName=self._at.stream,
                    startFromHead=True,
                    **since,
                )
            for event in page["events"]:
                at_ms = int(event["timestamp"])
                if at_ms == first_ms and skip > 0:
                    skip -= 1
                    continue
                count = self._at.count + 1 if at_ms == self._at.at_ms else 1
                self._at = replace(self._at, at_ms=at_ms, count=count)
                yield LogLine(text=event["message"].rstrip("\n"), position=str(self._at))
            token = str(page["nextForwardToken"])
            if token == self._token:
                return
            self._token = token
