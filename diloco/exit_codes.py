"""Exit codes of our processes, and which error means which.

0 the run is over, 1 a crash, 75 the store was away for too long, or denied for too long what it had
permitted before, to this process or to an earlier one of the run (EX_TEMPFAIL), 78 something is
wrong that a restart will not mend (EX_CONFIG), 143 it left because it was asked to, by SIGTERM or a
``drain`` command; its last beat says why, and its state is saved.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from diloco.errors import FencedOut, ReplicaError
from diloco.protocol.group_document import ProtocolMismatch
from diloco.protocol.settings import SettingsError
from diloco.store.base import ListingTooLong, StoreDenied, StoreUnavailable
from diloco.store.retry import permitted_before

EX_TEMPFAIL = 75
EX_CONFIG = 78
EX_TERMINATED = 143


def exit_code_of(work: Callable[[], int]) -> int:
    """Do ``work`` and return its exit code, or that of its error, which is printed for people."""
    try:
        return work()
    except StoreUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return EX_TEMPFAIL
    except (
        ReplicaError, ProtocolMismatch, SettingsError, StoreDenied, ListingTooLong, ValueError,
    ) as error:  # fmt: skip
        kind = "fenced out" if isinstance(error, FencedOut) else "error"
        print(f"{kind}: {error}", file=sys.stderr)
        is_outage = isinstance(error, StoreDenied) and permitted_before()
        return EX_TEMPFAIL if is_outage else EX_CONFIG
    except Exception:
        traceback.print_exc()
        return 1
