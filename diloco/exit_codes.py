"""Exit codes of the replica and syncer processes.

====  ================  =======================================================================
0                       the run has ended
1                       unexpected exception
75    ``EX_TEMPFAIL``   the store was unavailable for too long, or denied for too long what it
                        had permitted earlier in the run
78    ``EX_CONFIG``     an error that a restart does not fix
143   ``EX_TERMINATED`` left on request (SIGTERM or a ``drain`` command); the state is saved and
                        the last heartbeat has the reason
====  ================  =======================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from diloco.error_lines import print_error
from diloco.errors import FencedOut, ReplicaError
from diloco.protocol.group_document import ProtocolMismatch
from diloco.protocol.settings import SettingsError
from diloco.store.base import ListingTooLong, StoreDenied, StoreUnavailable
from diloco.store.retry import permitted_before

EX_TEMPFAIL = 75
EX_CONFIG = 78
EX_TERMINATED = 143

PERMANENT = (
    ReplicaError,
    ProtocolMismatch,
    SettingsError,
    StoreDenied,
    ListingTooLong,
    ValueError,
)
"""Errors that a restart does not fix."""


def exit_code_of(work: Callable[[], int], *, uri: str = "", verbose: bool = False) -> int:
    """Call ``work`` and return its exit code; print its exception and return the code of that.

    An expected error is one line (:func:`~diloco.error_lines.print_error`), of the store at
    ``uri``; another exception has its traceback.
    """
    try:
        return work()
    except StoreUnavailable as error:
        print_error(error, uri=uri, verbose=verbose)
        return EX_TEMPFAIL
    except PERMANENT as error:
        kind = "fenced out" if isinstance(error, FencedOut) else "error"
        print_error(error, uri=uri, kind=kind, verbose=verbose)
        is_outage = isinstance(error, StoreDenied) and permitted_before()
        return EX_TEMPFAIL if is_outage else EX_CONFIG
    except Exception:
        with contextlib.suppress(OSError):  # a closed standard error
            traceback.print_exc()
        return 1


def end_process(code: int) -> NoReturn:
    """End the process with ``code``, without the finalization of the interpreter.

    Finalization ends each daemon thread where it next needs the global interpreter lock. Inside an
    extension of C++ or Rust, for example where a request of the store hangs or a tensor is freed,
    this aborts the process with SIGABRT instead of ``code``. The functions of :mod:`atexit` are
    called, and the output is flushed, also that of C libraries.
    """
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed; the next one is flushed
                stream.flush()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)
    finally:
        os._exit(code)
