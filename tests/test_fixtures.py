"""The servers that other tests use behave as expected."""

from __future__ import annotations

import fsspec
import pytest

pytestmark = pytest.mark.processes


def test_s3_stores_objects_and_supports_conditional_create(s3_uri: str) -> None:
    file_system, path = fsspec.core.url_to_fs(
        f"{s3_uri}/key", skip_instance_cache=True, use_listings_cache=False
    )
    file_system.pipe_file(path, b"first", mode="create")
    with pytest.raises(OSError):
        file_system.pipe_file(path, b"second", mode="create")
    assert file_system.cat_file(path) == b"first"


def test_s3_checks_signatures(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    file_system, path = fsspec.core.url_to_fs(f"{s3_uri}/key", skip_instance_cache=True)
    with pytest.raises(PermissionError):
        file_system.pipe_file(path, b"x")
