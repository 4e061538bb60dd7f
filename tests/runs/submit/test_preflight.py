"""Checks of the bucket and the data in the submit form, before a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from diloco.store.base import LocalStore, StoreDenied
from runs.submit.preflight import check_data, check_rendezvous


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/"])
def test_a_folder_that_can_be_written_is_fine_and_left_clean(tmp_path: Path, form: str) -> None:
    assert check_rendezvous(form.format(tmp_path / "new"), ["local"]) == []
    assert [*tmp_path.iterdir()] == []


def test_a_real_bucket_is_fine_and_left_clean(s3_uri: str) -> None:
    from diloco.store.open import open_store

    assert check_rendezvous(s3_uri, ["local"]) == []
    assert open_store(s3_uri).list("") == []


@pytest.mark.parametrize("verb", ["put", "get", "get_range", "list", "create", "delete"])
def test_each_denied_operation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def denied(*args: Any) -> None:
        raise StoreDenied("AccessDenied: policy forbids it")

    monkeypatch.setattr(LocalStore, verb, denied)
    [problem] = check_rendezvous(str(tmp_path), ["local"])
    text = {"put": "write", "get": "read", "get_range": "read a range"}.get(verb, verb)
    assert problem.startswith(f"cannot {text} in file://")
    assert "AccessDenied: policy forbids it" in problem


def test_a_non_atomic_create_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_then_write(self: LocalStore, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True

    monkeypatch.setattr(LocalStore, "create", check_then_write)
    [problem] = check_rendezvous(str(tmp_path), ["local"])
    assert "refuse to create twice" in problem
    assert "expected False, found True" in problem
    assert files(tmp_path) == []


def test_a_file_in_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    [problem] = check_rendezvous(str(tmp_path / "file" / "run"), ["local"])
    assert "cannot write" in problem
    assert str(tmp_path / "file") in problem


def test_an_unknown_scheme_is_reported() -> None:
    [problem] = check_rendezvous("moon://crater/1", ["local"])
    assert problem.startswith("cannot be opened: ")
    assert "moon" in problem


@pytest.mark.parametrize("uri", ["/srv/here", "file:///srv/here", "http://localhost:9000/b"])
def test_a_remote_backend_needs_a_bucket_it_can_reach(uri: str) -> None:
    [problem] = check_rendezvous(uri, ["local", "modal"])
    assert problem == (
        f"expected a bucket that replicas on modal can reach, found {uri}, "
        "which only this machine can"
    )


def test_the_library_s_own_text_needs_no_check() -> None:
    assert check_data("stdlib") == []


@pytest.mark.parametrize("form", ["{}/a.txt", "file://{}/a.txt", "{}", "{}/*.txt"])
def test_text_is_found(tmp_path: Path, form: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").touch()
    assert check_data(form.format(tmp_path)) == []


@pytest.mark.parametrize("form", ["{}/no.txt", "{}/*.md", "{}/sub"])
def test_missing_text_is_reported_with_the_uri(tmp_path: Path, form: str) -> None:
    (tmp_path / "sub").mkdir()
    [problem] = check_data(form.format(tmp_path))
    assert problem.startswith("expected 'stdlib' or a URI of text files that can be read, found ")
    assert form.format(tmp_path) in problem


def test_empty_files_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert "found only empty files" in check_data(str(tmp_path))[0]


@pytest.mark.parametrize("uri", ["moon://crater/a.txt", "s3://"])
def test_a_uri_that_cannot_be_opened_is_reported(uri: str) -> None:
    [problem] = check_data(uri)
    assert uri.partition("/")[0] in problem


def test_the_listing_of_a_data_bucket_ends_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from runs.submit import bucket_check

    pages = 0

    def endless(fs: Any, folder: str, options: Any) -> Any:
        nonlocal pages
        while True:
            pages += 1
            yield [(f"{folder}/{pages}-{n}.bin", 0) for n in range(1000)]

    monkeypatch.setattr(bucket_check, "pages_of", endless)
    monkeypatch.setattr(bucket_check, "refuse_data", lambda uri: "")
    fsspec.filesystem("memory").makedirs("/data", exist_ok=True)
    for uri, result in (("memory://data/*.txt", "nothing"), ("memory://data", "only empty files")):
        pages = 0
        [problem] = check_data(uri)
        assert f"found {result} at {uri} among the first 10000 objects" in problem
        assert pages == 10


@pytest.mark.parametrize(
    "uri",
    ["memory://corpus", "memory://corpus/*.txt", "memory://corpus/a.txt", "memory://corpus/**"],
)
def test_data_of_a_bucket_is_found(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runs.submit.bucket_check.refuse_data", lambda uri: "")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/corpus/a.txt", b"text")
    fs.pipe_file("/corpus/empty.bin", b"")
    try:
        assert check_data(uri) == []
        assert "found only empty files" in check_data("memory://corpus/*.bin")[0]
        assert "found nothing" in check_data("memory://corpus/*.csv")[0]
    finally:
        fs.rm("/corpus", recursive=True)
