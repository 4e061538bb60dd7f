"""Addresses that are left out on PostgreSQL send no statement that the other ones do not send."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.backends.utils import CursorWrapper

from tests.adversarial import addresses
from tests.browser import seed
from tests.statements import Recorder


@pytest.mark.django_db
@pytest.mark.slow
def test_variants_send_no_other_statement(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = seed.user("owner", "operator")
    run = seed.run(owner, committed=2, replicas=2)
    client.force_login(owner)
    recorder = Recorder()
    recording = recorder.recording(CursorWrapper._execute)  # type: ignore[attr-defined]
    monkeypatch.setattr(CursorWrapper, "_execute", recording)

    def sent(address: str) -> set[str]:
        recorder.sent.clear()
        response = client.get(address)
        if response.streaming:
            b"".join(response.streaming_content)
        assert response.status_code == 200, address
        return set(recorder.sent)

    known = set[str]().union(*map(sent, addresses.statements_of(run)))
    for address in addresses.variants(run):
        assert sent(address) <= known, address
