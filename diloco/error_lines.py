"""Errors as one line with the remedy; ``-v`` shows the traceback.

Expected errors name what was expected and found, so that their traceback helps no user. Unexpected
exceptions keep theirs.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from diloco.errors import ReplicaError
from diloco.protocol.group_document import ProtocolMismatch
from diloco.protocol.settings import SettingsError
from diloco.store.base import CannotOpen, StoreDenied, StoreError, StoreUnavailable

EXPECTED = (ReplicaError, ProtocolMismatch, SettingsError, StoreError, ValueError)
"""Errors of arguments, settings and stores."""
VERBOSE = ("-v", "--verbose")


def error_line(error: BaseException) -> str:
    """Return the message of an error and its notes as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    return " ".join([f"{text.rstrip('.')}." if notes else text, *notes])


def print_error(
    error: BaseException,
    *,
    uri: str = "",
    kind: str = "error",
    message: str = "",
    verbose: bool = False,
) -> None:
    """Print an error to standard error: one line, after its traceback if ``verbose``.

    ``uri`` is the store of the command, for the remedy; ``message`` replaces that of the error. A
    closed or full standard error is ignored, so that the exit code stays that of the error.
    """
    if uri:
        add_remedy(error, uri)
    with contextlib.suppress(OSError):
        if verbose:
            traceback.print_exception(error)
        print(f"{kind}: {message or error_line(error)}", file=sys.stderr, flush=True)


def add_remedy(error: BaseException, uri: str) -> None:
    """Add a note with the remedy to an error of the store at ``uri``; others name theirs."""
    test = f"Test the bucket with python -m diloco.preflight {uri}"
    if isinstance(error, StoreUnavailable):
        error.add_note(
            f"Check the network, that the server runs, and the endpoint (AWS_ENDPOINT_URL). {test}"
        )
    elif isinstance(error, StoreDenied) and not isinstance(error, CannotOpen):
        error.add_note(f"Check the URI and the credentials (AWS_ACCESS_KEY_ID, ...). {test}")


_ONE_LINE = "_in_one_line"
"""Attribute of an error that is printed as one line. The hook has no reference to the error: it
would keep the frames of a handled one, and with them a model, until the program ends."""


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of :func:`in_one_line` that the program does not handle as one line; every
    other exception, and all of a program that was started with ``-v``, as Python does."""
    if getattr(error, _ONE_LINE, False) and not set(VERBOSE) & set(sys.argv[1:]):
        print_error(error)
    else:
        sys.__excepthook__(kind, error, trace)


@contextlib.contextmanager
def in_one_line(uri: str) -> Iterator[None]:
    """Add the remedy to expected errors of the block, and if one ends the program, print it as one
    line. A program with its own :func:`sys.excepthook` keeps it."""
    try:
        yield
    except EXPECTED as error:
        add_remedy(error, uri)
        if sys.excepthook is sys.__excepthook__ or sys.excepthook is _hook:
            setattr(error, _ONE_LINE, True)
            sys.excepthook = _hook
        raise
