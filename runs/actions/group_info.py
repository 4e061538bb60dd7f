"""``GET /api/runs/<id>/info``: what a client of a group must match before it joins.

The server is the authority. The answer is the document that replicas read from the rendezvous, with
every group setting and no nulls, and with the field names that clients of other DiLoCo servers
expect.
"""

from __future__ import annotations

import json
from typing import Any

from runs.models import Run
from runs.reconcile.group_publishing import group_document

PENDING = "pending"


def info_of(run: Run) -> dict[str, Any]:
    document = group_document(run, run.code_sha256)
    body: dict[str, Any] = json.loads(document.to_bytes())
    if not run.group_fingerprint:
        # The launch adds the digest of the code, which changes the fingerprint.
        body |= {"code": PENDING, "fingerprint": PENDING}
    settings = document.settings
    expected = settings.to_dict() | {
        "bf16_comm": settings.codec == "bf16",
        "heartbeat_timeout": settings.heartbeat_timeout_s,
    }
    return body | {
        "expected_client_settings": expected,
        "settings_authority": "server",
        "model_hash": run.model_hash or PENDING,
    }
