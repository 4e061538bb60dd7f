"""Large objects: verified part by part; damage is refused by name before values are used."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.errors import DamagedObject
from diloco.exchange.upload import VERIFY_UPLOAD_BYTES
from diloco.model import tensor_file
from diloco.model.tensor_file import Window
from diloco.protocol import object_digest, pieces
from diloco.protocol.object_digest import ObjectDigest, checksum_of, digest_of
from diloco.protocol.pieces import piece_key
from diloco.protocol.records import StoredObject
from diloco.store.base import LocalStore, MissingKey
from diloco.store.multipart import MakeParts
from diloco.training import stored_objects
from diloco.training.stored_objects import (
    get_object,
    load_tensors,
    load_windows,
    put_object,
    put_parts,
    put_tensors,
    verify_object,
)

PART = 256
KEY = "checkpoints/x"
TENSORS = {"a": torch.arange(300.0), "b": torch.arange(7), "c": torch.tensor(1.5)}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_file, object_digest, pieces, stored_objects):
        monkeypatch.setattr(module, "PART_BYTES", PART)


class Counting(LocalStore):
    """Counts the reads of each range; damages the first ``times`` reads of the range at
    ``damaged``, and the first ``spoilt`` uploads."""

    def __init__(self, root: Path, *, damaged: int = -1, times: int = 0, spoilt: int = 0) -> None:
        super().__init__(root)
        self.reads: Counter[tuple[int, int]] = Counter()
        self.uploads = 0
        self._damaged, self._times, self._spoilt = damaged, times, spoilt

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads[start, length] += 1
        data = super().get_range(key, start, length)
        if start == self._damaged and length > 1 and self.reads[start, length] <= self._times:
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    def put_stream(self, key: str, make_parts: MakeParts, *, size_bytes: int | None = None) -> None:
        self.uploads += 1
        super().put_stream(key, make_parts, size_bytes=size_bytes)
        if self.uploads <= self._spoilt:
            self.put(key, b"\xff" + self.get(key)[1:])


def test_tensors_round_trip_in_parts(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    stored = put_tensors(store, KEY, TENSORS)
    assert len(stored.checksums) == 16 * -(-stored.size_bytes // PART) and not stored.sha256
    found = load_tensors(store, stored)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    assert max(length for _, length in store.reads) == PART
    assert load_file(tmp_path / KEY).keys() == TENSORS.keys()


def test_a_part_damaged_in_transit_alone_is_read_again(tmp_path: Path) -> None:
    stored = put_tensors(LocalStore(tmp_path), KEY, TENSORS)
    store = Counting(tmp_path, damaged=2 * PART, times=2)
    assert torch.equal(load_tensors(store, stored)["a"], TENSORS["a"])
    assert store.reads.pop((2 * PART, PART)) == 3
    assert set(store.reads.values()) == {1}


@pytest.mark.parametrize("at", [0, 2 * PART + 5, -1])
def test_a_damaged_part_is_refused_by_name(tmp_path: Path, at: int) -> None:
    store = LocalStore(tmp_path)
    stored = put_tensors(store, KEY, TENSORS)
    data = bytearray(store.get(KEY))
    data[at] ^= 1
    store.put(KEY, data)
    start = at % len(data) // PART * PART
    with pytest.raises(DamagedObject, match=rf"{KEY}: expected checksum .* bytes from {start}"):
        load_tensors(store, stored)
    with pytest.raises(DamagedObject, match=KEY):
        verify_object(store, stored)


@pytest.mark.parametrize("left", [0, 1, PART, PART + 1])
def test_a_truncated_object_is_refused(tmp_path: Path, left: int) -> None:
    store = LocalStore(tmp_path)
    stored = put_tensors(store, KEY, TENSORS)
    store.put(KEY, store.get(KEY)[:left])
    with pytest.raises(DamagedObject, match=KEY):
        load_tensors(store, stored)


def test_a_manifest_that_claims_more_than_the_object_has_reserves_no_memory(tmp_path: Path) -> None:
    """Its first part is right, and names a tensor of petabytes."""
    store = LocalStore(tmp_path)
    fields = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (2**50, 2**52)
    header = len(fields).to_bytes(8, "little") + fields
    size = len(header) + 2**52
    data = header + bytes(PART - len(header))
    store.put(KEY, data)
    reserved: list[object] = []
    count = -(-size // PART)
    claimed = StoredObject(key=KEY, size_bytes=size, checksums=checksum_of(data))
    with pytest.raises(DamagedObject, match=f"expected checksums of {count} parts"):
        load_tensors(store, claimed, reserved.append)
    assert not reserved


def test_parts_with_another_length_are_refused(tmp_path: Path) -> None:
    """The checksums are those of the object, which is shorter than in its manifest."""
    store = LocalStore(tmp_path)
    store.put(KEY, b"short")
    claimed = StoredObject(key=KEY, size_bytes=PART, checksums=checksum_of(b"short"))
    with pytest.raises(DamagedObject, match=f"of the {PART} bytes from 0, found .* of 5 bytes"):
        get_object(store, claimed)


@pytest.mark.parametrize("size_bytes", [0, -1, -PART])
def test_an_object_without_bytes_is_refused(tmp_path: Path, size_bytes: int) -> None:
    """Its manifest has a checksum of each part: of none."""
    store = LocalStore(tmp_path)
    store.put(KEY, b"")
    claimed = StoredObject(key=KEY, size_bytes=size_bytes)
    for read in (verify_object, get_object, load_tensors):
        with pytest.raises(DamagedObject, match=f"{KEY}: expected a size .* found {size_bytes}$"):
            read(store, claimed)


def test_an_object_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stored = put_object(store, KEY, b"x" * 1000)
    assert get_object(store, stored) == b"x" * 1000
    with pytest.raises(DamagedObject, match=f"{KEY}: expected safetensors, found"):
        load_tensors(store, stored)


@pytest.mark.parametrize("data", [b"x", b"x" * PART, b"x" * (PART + 1)])
def test_small_objects_round_trip(tmp_path: Path, data: bytes) -> None:
    stored = put_object(LocalStore(tmp_path), KEY, data)
    assert stored.size_bytes == len(data)
    assert get_object(LocalStore(tmp_path), stored) == data


def test_an_upload_that_arrives_damaged_is_repeated(tmp_path: Path) -> None:
    store = Counting(tmp_path, spoilt=2)
    verify_object(store, put_tensors(store, KEY, TENSORS))
    assert store.uploads == 3


def test_an_upload_is_read_back_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERIFY_UPLOAD_BYTES, str(2 * PART))
    store = Counting(tmp_path)
    stored = put_tensors(store, KEY, TENSORS)
    last = (stored.size_bytes - 1) // PART * PART
    assert sorted(start for start, _ in store.reads) == [0, last]
    monkeypatch.setenv(VERIFY_UPLOAD_BYTES, "0")
    store = Counting(tmp_path)
    put_tensors(store, KEY, TENSORS)
    assert not store.reads


def test_a_check_aborts_an_upload(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    seen: list[int] = []

    def check() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise Stop

    store = LocalStore(tmp_path)
    with pytest.raises(Stop):
        put_tensors(store, KEY, TENSORS, check=check)
    assert not store.list("")


def test_digests_do_not_depend_on_the_size_of_pieces(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3 + b"end"
    stored = put_parts(LocalStore(tmp_path), KEY, lambda: [data], sha256=True)
    assert stored.digest == stored.sha256
    for size in (1, 100, PART, 1000):
        digest = ObjectDigest()
        for at in range(0, len(data), size):
            digest.update(data[at : at + size])
        assert (digest.checksums, digest.sha256) == (stored.checksums, stored.sha256)
        assert digest.matches(stored.digest) and digest.matches(digest_of(stored.checksums))
        assert not digest.matches("") and not digest.matches(digest_of(""))
    assert replace(stored, sha256="").digest == digest_of(stored.checksums)


def in_pieces(store: LocalStore, stored: StoredObject, *sizes: int) -> StoredObject:
    """Store an object again in pieces, as several ranks do."""
    data = store.get(KEY)
    sizes = (*sizes, len(data) - sum(sizes))
    digest, at = ObjectDigest(pieces=sizes), 0
    digest.update(data)
    for n, size in enumerate(sizes):
        store.put(piece_key(KEY, n), data[at : at + size])
        at += size
    return replace(stored, checksums=digest.checksums, pieces=sizes)


def test_an_object_in_pieces_is_read_like_a_whole_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stored = in_pieces(store, put_tensors(store, KEY, TENSORS), 40, PART, 1)
    for name, tensor in load_tensors(store, stored).items():
        assert torch.equal(tensor, TENSORS[name])
    verify_object(store, stored)
    data = store.get(piece_key(KEY, 1))
    store.put(piece_key(KEY, 1), data[:-1])
    with pytest.raises(DamagedObject, match=r"found .* of 255 bytes"):
        load_tensors(store, stored)
    store.put(piece_key(KEY, 1), data[:-1] + b"!")
    with pytest.raises(DamagedObject, match=re.escape(piece_key(KEY, 1))):
        verify_object(store, stored)
    store.put(piece_key(KEY, 1), data)
    store.delete([piece_key(KEY, 2)])
    with pytest.raises(MissingKey):
        load_tensors(store, stored)


def test_only_parts_with_wanted_elements_are_read(tmp_path: Path) -> None:
    stored = put_tensors(LocalStore(tmp_path), KEY, {"a": torch.arange(1000.0)})
    store, into = Counting(tmp_path), torch.empty(70)
    load_windows(store, stored, lambda entry: [Window(500, into)])
    assert into.tolist() == [*range(500, 570)]
    first = (stored.size_bytes - 4000 + 4 * 500) // PART
    parts = {start // PART for start, length in store.reads if length > 1}
    assert parts == {0, first, first + 1}
