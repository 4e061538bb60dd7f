"""Canonical rendezvous URIs: normalization, rejected spellings, and containment."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.store.base import LocalStore, StoreDenied
from diloco.store.location import BadLocation, Location, canonical, file_uri
from diloco.store.open import open_store


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("S3://bucket/run///", "s3://bucket/run"),
        ("s3a://bucket/run", "s3://bucket/run"),
        ("s3://bucket/", "s3://bucket"),
        ("GCS://bucket/Run", "gs://bucket/Run"),
        ("abfs://box/run", "az://box/run"),
        ("abfss://box/run", "az://box/run"),
        ("hf://datasets/Ada/set/run/", "hf://datasets/Ada/set/run"),
        ("hf://models/ada/net/run", "hf://ada/net/run"),
    ],
)
def test_bucket_uris_are_normalized(uri: str, expected: str) -> None:
    assert canonical(uri).uri == expected
    assert canonical(expected).uri == expected


@pytest.mark.parametrize(
    "spelling",
    [
        "{0}/run",
        "{0}/run/",
        "{0}//run",
        "{0}/./run",
        "{0}/x/../run",
        "//{0}/run",
        "file://{0}/run",
        "FILE://{0}/run",
        "file:{0}/run",
        "file://localhost{0}/run",
        "local://{0}/run",
        "file://{0}/%72un",
        "file://{0}/%2e/run",
        "file://{0}/x/%2E%2e/run",
        "file:///{0}/run",
        "{0}/link",
    ],
)
def test_folder_uris_are_normalized(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    result = canonical(spelling.format(tmp_path))
    assert result.uri == (tmp_path / "run").as_uri()
    assert result.folder == tmp_path / "run"
    assert canonical(result.uri) == result


def test_a_relative_path_is_resolved_against_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert canonical("run").folder == tmp_path / "run"
    assert canonical("s3/run").folder == tmp_path / "s3" / "run"


@pytest.mark.parametrize("name", ["a b", "a%b", "a?b", "a#b", "ä", "a:b", "a@b", "~a"])
def test_a_folder_can_have_any_name(name: str, tmp_path: Path) -> None:
    location = canonical(str(tmp_path / name))
    assert location.folder == tmp_path / name
    assert canonical(location.uri) == location
    assert LocalStore(tmp_path / name).uri == location.uri == file_uri(tmp_path / name)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "s3://",
        "s3:///run",
        "s3:/bucket/run",
        "s3:bucket/run",
        "s3//bucket/run",
        "s3://Bucket/run",
        "s3://bucket:443/run",
        "s3://bucket//run",
        "s3://bucket/./run",
        "s3://bucket/run/..",
        "s3://bucket/%72un",
        "s3://bucket/a\\b",
        "s3://bucket/run?x=1",
        "s3://bucket/run#x",
        "s3://bucket/r\nun",
        "s3://bucket/\0",
        "gs://Bucket/run",
        "az://Box/run",
        "az://box@account.dfs.core.windows.net/run",
        "hf://datasets/ada",
        "hf://ada/net@main/run",
        "file://host/run",
        "file:run",
        "file:///run?x",
        "file:///run#x",
        "file:///a%00b",
        "memory://run",
        "http://host/run",
        "simplecache::s3://bucket/run",
        "moon://crater/1",
    ],
)
def test_ambiguous_uris_are_rejected(uri: str) -> None:
    with pytest.raises(BadLocation, match="expected "):
        canonical(uri)


def test_an_error_does_not_contain_a_password() -> None:
    with pytest.raises(BadLocation) as caught:
        canonical("s3://key:hunter2@bucket/run")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "contains", "overlaps"),
    [
        ("s3://b/runs", "s3://b/runs", True, True),
        ("s3://b/runs", "s3://b/runs/1", True, True),
        ("s3://b/runs/1", "s3://b/runs", False, True),
        ("s3://b/runs", "s3://b/runs-other", False, False),
        ("s3://b/runs", "s3://b/Runs", False, False),
        ("s3://b", "s3://b/runs", True, True),
        ("s3://b", "s3://bb/runs", False, False),
        ("s3://b/runs", "gs://b/runs", False, False),
        ("/", "/srv/run", True, True),
        ("/srv/run", "/srv/runs", False, False),
        ("hf://datasets/Ada/set", "hf://datasets/ada/SET/run", True, True),
    ],
)
def test_one_location_contains_another(
    one: str, other: str, contains: bool, overlaps: bool
) -> None:
    assert canonical(one).contains(canonical(other)) is contains
    assert canonical(one).overlaps(canonical(other)) is overlaps


def test_parents_are_the_enclosing_locations() -> None:
    above = [location.uri for location in canonical("s3://b/x/y").parents]
    assert above == ["s3://b/x", "s3://b"]
    assert [location.uri for location in Location(scheme="file", bucket="", path="x").parents] == [
        "file:///"
    ]
    assert canonical("s3://b").parents == ()


@pytest.mark.parametrize("uri", ["", "s3//bucket/run", "file://host/run", "file:run"])
def test_a_misspelt_uri_opens_no_folder(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreDenied, match="expected "):
        open_store(uri)
    assert [*tmp_path.iterdir()] == []
