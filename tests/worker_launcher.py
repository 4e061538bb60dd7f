"""What `pytest -n` starts as a worker: it hands its standard streams to a fork of the collector.

``worker_launcher.py SOCKET PYTHON_ARGUMENTS`` is a process of the worker's life: see
:mod:`tests.forked_workers`. If no collector accepts the connection it becomes an ordinary worker,
``python PYTHON_ARGUMENTS``, which collects the tests itself and reports what prevents it.
"""

import contextlib
import os
import signal
import socket
import sys

STREAMS = (0, 1, 2)


def main(address: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.connect(address)
        socket.send_fds(connection, [b"+"], STREAMS)
        if connection.recv(1):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker gets it, too
            connection.recv(1)  # until the worker ends
            return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
