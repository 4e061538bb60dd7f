"""Average tensors over a fixed set of ranks, through an object store.

Use this where all that is needed is an average. For a group whose members can change, use
:func:`diloco.join`.

::

    allreduce/<round id>/sessions/<rank>.json        the sessions that this rank has seen
    allreduce/<round id>/<group>/<call>/<rank>.bin   one rank's tensor in one call

A restarted rank must not average objects that an earlier run has left. So each instance draws a
random *session*, and the first call is a handshake: a rank continues only once the session object
of every other rank repeats this rank's session, which only a process that has read it can write.
The hash of the agreed sessions is the *group*. The key and the header of every payload contain it,
so payloads of earlier runs are never read. A single restarted rank waits until its timeout.

Each rank reads the payloads in rank order, one at a time, and adds them up. Memory is the tensor,
one payload and one sum (fp32; float64 for float64), independent of the world size. Every rank
computes the same bits. A rank deletes its payload once all ranks have written the next one, so the
store holds at most two payloads per rank.

Errors: :class:`ValueError` for invalid arguments or calls that differ between ranks,
:class:`TimeoutError` naming the missing ranks, :class:`~diloco.exchange.payload.BadPayload` for a
damaged object, and :class:`~diloco.store.base.StoreError`. After any of them the ranks are out of
step: create new instances on all ranks. Not supported: changing membership, compression, and
reductions other than the mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import secrets
import struct
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from diloco.clock import Clock, SystemClock
from diloco.exchange.checked_blocks import BadPayload
from diloco.protocol import keys
from diloco.protocol.parsing import parse_json
from diloco.store.base import MissingKey, ObjectTooLarge, Store
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore

log = logging.getLogger(__name__)

FIRST_POLL_S = 0.02
"""First pause of a wait in seconds; doubles up to ``poll_interval_s``."""
RETRY_S = 60.0
"""For how long requests are retried while the store is unavailable."""
SESSION_LIMIT = 1 << 20
"""Maximum bytes of a session object; it holds some tens of bytes per rank."""
MAGIC = b"ARCHIAR1"
_PREFIX = struct.Struct("<8sI")
HEADER_LIMIT = 64 * 1024
"""Maximum bytes of a payload before its tensor."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DTYPES = {str(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True, kw_only=True)
class Call:
    """The properties of a call on which all ranks must agree."""

    group: str
    call: int
    name: str | None
    dtype: str
    shape: tuple[int, ...]


class ObjectStoreAllReduce:
    """Averages tensors over ``world_size`` ranks, as rank ``rank``.

    ``uri`` is any URI that :func:`~diloco.store.open.open_store` accepts. Instances that use one
    URI at the same time need different ``round_id``. ``timeout_s`` bounds each call;
    ``poll_interval_s`` is the longest pause between two requests while waiting.
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        round_id: str | int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, found {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 to {world_size - 1}, found {rank}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected more than 0, found {timeout_s}")
        if not poll_interval_s > 0:
            raise ValueError(f"poll_interval_s: expected more than 0, found {poll_interval_s}")
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.poll_interval_s = poll_interval_s
        self.session = secrets.token_hex(16)
        self._round_id = _checked("round_id", "default" if round_id is None else str(round_id))
        self._clock: Clock = clock or SystemClock()
        rng = random.Random(secrets.randbits(64))
        self.store = store or open_store(uri)
        self._store = RetryingStore(
            self.store, clock=self._clock, rng=rng, deadline_s=min(RETRY_S, timeout_s)
        )
        self._group = ""
        self._calls = 0
        self._failed = False

    @torch.no_grad()
    def allreduce(self, tensor: Tensor, name: str | None = None) -> Tensor:
        """Replace ``tensor`` by its average over all ranks, in place, and return it.

        ``tensor`` has any shape, device and strides, and dtype float16, bfloat16, float32 or
        float64 (integers have no average in their dtype). Every rank makes the same calls in the
        same order. ``name`` appears in error messages and must be equal on all ranks.

        Raises :class:`ValueError`, :class:`TimeoutError`,
        :class:`~diloco.exchange.payload.BadPayload` or :class:`~diloco.store.base.StoreError`.
        """
        if str(tensor.dtype) not in _DTYPES:
            raise ValueError(f"dtype: expected one of {sorted(_DTYPES)}, found {tensor.dtype}")
        if name is not None:
            _checked("name", name)
        if self._failed:
            raise RuntimeError(
                "an earlier call failed, so the ranks are out of step: make a new "
                "ObjectStoreAllReduce on every rank"
            )
        if self.world_size > 1:
            self._failed = True
            self._average(tensor, name)
            self._failed = False
        return tensor

    def _average(self, tensor: Tensor, name: str | None) -> None:
        wait = _Wait(self._clock, self.timeout_s, self.poll_interval_s)
        if not self._group:
            self._group = self._handshake(wait)
            self._delete_leftovers()
        self._calls += 1
        call = Call(
            group=self._group,
            call=self._calls,
            name=name,
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape),
        )
        own = tensor.detach().cpu().contiguous()
        self._store.put(self._key(call.call, self.rank), _pack(call, self.rank, own))
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        total = torch.zeros(own.shape, dtype=wide)
        for rank in range(self.world_size):
            peer = own if rank == self.rank else self._payload(call, rank, wait)
            total.add_(peer.to(wide))
        total.div_(self.world_size)
        tensor.detach().copy_(total)
        if call.call > 1:  # all ranks have written this call, so none reads the previous one
            self._store.delete([self._key(call.call - 1, self.rank)])

    # -- payloads --------------------------------------------------------------------------------

    def _key(self, call: int, rank: int) -> str:
        return keys.allreduce_payload(self._round_id, self._group, call, rank)

    def _read(self, key: str, call: Call) -> bytes:
        """Read a payload. If it is larger than this call's can be, read only its beginning: the
        header shows how the calls differ."""
        size = torch.Size(call.shape).numel() * _DTYPES[call.dtype].itemsize
        try:
            return self._store.get(key, limit=size + HEADER_LIMIT)
        except ObjectTooLarge:
            return self._store.get_range(key, 0, HEADER_LIMIT)

    def _payload(self, call: Call, rank: int, wait: _Wait) -> Tensor:
        key = self._key(call.call, rank)
        wait.begin()
        while True:
            try:
                return _unpack(self._read(key, call), call, rank)
            except MissingKey:
                pass
            if not wait.pause():
                here = {info.key for info in self._store.list(key.rpartition("/")[0] + "/")}
                missing = [r for r in range(self.world_size) if self._key(call.call, r) not in here]
                if not missing:
                    continue  # it was written just now
                raise TimeoutError(
                    f"call {call.call}{f' ({call.name})' if call.name else ''}: expected the "
                    f"tensors of {self.world_size} ranks within {self.timeout_s:g} s, found none "
                    f"of ranks {missing}"
                )

    def _delete_leftovers(self) -> None:
        """Delete this rank's payloads of earlier groups, which no rank reads any more."""
        stored = [info.key for info in self._store.list(keys.allreduce(self._round_id))]
        parsed = [(key, keys.parse_allreduce_payload(key)) for key in stored]
        self._store.delete([key for key, of in parsed if of is not None and of[3] == self.rank])

    # -- the handshake ---------------------------------------------------------------------------

    def _session_key(self, rank: int) -> str:
        return keys.allreduce_session(self._round_id, rank)

    def _handshake(self, wait: _Wait) -> str:
        """Wait until every rank has read every other rank's session; return the group."""
        seen: dict[int, str] = {self.rank: self.session}
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._publish(seen)
        wait.begin()
        while True:
            waiting = {}
            sizes = {}
            before = dict(seen)
            for rank in others:
                peer = self._read_session(rank)
                if peer is None:
                    waiting[rank] = "missing"
                    continue
                seen[rank] = peer.session
                if peer.seen.get(str(self.rank)) != self.session:
                    waiting[rank] = "from an earlier run, or has not read this rank's session yet"
                elif peer.world_size != self.world_size:
                    sizes[rank] = peer.world_size
            if seen != before:
                self._publish(seen)  # before any error, so that the others can see it too
            if sizes:
                raise ValueError(
                    f"world_size: expected {self.world_size} on every rank, "
                    f"found {', '.join(f'{size} on rank {rank}' for rank, size in sizes.items())}"
                )
            if not waiting:
                ordered = [seen[rank] for rank in range(self.world_size)]
                return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()[:32]
            if not wait.pause():
                states = "; ".join(f"rank {rank} is {why}" for rank, why in waiting.items())
                raise TimeoutError(
                    f"expected the sessions of {self.world_size} ranks within {self.timeout_s:g} s "
                    f"under {self._store.uri}/{keys.allreduce(self._round_id)}, found: {states}"
                )

    def _publish(self, seen: dict[int, str]) -> None:
        text = json.dumps({"session": self.session, "world_size": self.world_size, "seen": seen})
        self._store.put(self._session_key(self.rank), text.encode())

    def _read_session(self, rank: int) -> _Session | None:
        key = self._session_key(rank)
        try:
            values = parse_json(self._store.get(key, limit=SESSION_LIMIT))
            session, size, seen = values["session"], values["world_size"], values["seen"]
        except MissingKey:
            return None
        except (ObjectTooLarge, ValueError, KeyError, TypeError):
            raise BadPayload(f"{key}: expected a session, found something else") from None
        if not isinstance(session, str) or not isinstance(seen, dict):
            raise BadPayload(f"{key}: expected a session, found something else")
        return _Session(session, size, seen)


@dataclass(frozen=True)
class _Session:
    """A rank's session object; ``seen`` maps ranks to the sessions that it has read."""

    session: str
    world_size: object
    seen: dict[str, object]


class _Wait:
    """The deadline of one call, and pauses of growing length."""

    def __init__(self, clock: Clock, timeout_s: float, longest_s: float) -> None:
        self._clock = clock
        self._give_up_s = clock.monotonic() + timeout_s
        self._longest_s = longest_s
        self.begin()

    def begin(self) -> None:
        self._pause_s = min(FIRST_POLL_S, self._longest_s)

    def pause(self) -> bool:
        """Sleep and return True; return False at once if the deadline has passed."""
        left_s = self._give_up_s - self._clock.monotonic()
        if left_s <= 0:
            return False
        self._clock.sleep(min(self._pause_s, left_s))
        self._pause_s = min(self._longest_s, 2 * self._pause_s)
        return True


def _checked(field: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{field}: expected letters, digits, dot, dash or underscore, found {text!r}"
        )
    return text


def _pack(call: Call, rank: int, tensor: Tensor) -> bytes:
    """Serialise a contiguous CPU tensor: magic, header length, JSON header, raw bytes."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    header = json.dumps(
        {**asdict(call), "rank": rank, "sha256": hashlib.sha256(raw).hexdigest()}
    ).encode()
    return _PREFIX.pack(MAGIC, len(header)) + header + raw


def _unpack(data: bytes, expected: Call, rank: int) -> Tensor:
    """Parse a payload into a tensor. Raises :class:`ValueError` if it belongs to another call than
    ``expected``, and :class:`BadPayload` if it is damaged."""
    try:
        magic, length = _PREFIX.unpack_from(data)
        header = json.loads(data[_PREFIX.size : _PREFIX.size + length])
        shape = tuple(int(n) for n in header["shape"])
    except (struct.error, ValueError, KeyError, TypeError):
        raise BadPayload(f"rank {rank}: expected a payload, found {data[:16]!r}...") from None
    if magic != MAGIC or header.get("rank") != rank:
        raise BadPayload(f"rank {rank}: expected its payload, found {data[:16]!r}...")
    for what, own in asdict(expected).items():
        peer = shape if what == "shape" else header.get(what)
        if peer != own:
            raise ValueError(
                f"call {expected.call}: expected {what} {own} as on this rank, "
                f"found {peer} on rank {rank}"
            )
    raw = bytearray(data[_PREFIX.size + length :])
    if hashlib.sha256(raw).hexdigest() != header.get("sha256"):
        raise BadPayload(f"rank {rank}: expected the sha256 of its header, found another")
    dtype = _DTYPES[expected.dtype]
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(shape)
