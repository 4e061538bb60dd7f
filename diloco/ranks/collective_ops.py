"""What the ranks of one replica do together: everything that touches the model.

The leader's round loop calls it as if it were alone; each call first says a :class:`Word` that
names the :class:`Operation`, and a follower that hears it does its part.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from diloco.clock import Clock, SystemClock
from diloco.errors import ModelMismatch, ReplicaError
from diloco.model import named_parameters
from diloco.model.flat_parameters import Layout
from diloco.model.fragments import Slot
from diloco.model.inner_state import Inner, Stateful
from diloco.model.state_tree import join_tree, split_tree
from diloco.ranks.command_channel import Channel, Word
from diloco.telemetry.writer import Number

log = logging.getLogger(__name__)
T = TypeVar("T")

FAREWELL_S = 5.0
"""How long a rank that has failed tries to tell the others why. They may be in a collective of the
model's own and cannot listen; they then see its connections close."""
KEEP_LISTENING_S = 30.0
"""Of a leader's silence while it waits for others; after that it says that it still does."""
BUCKET = 2**22
"""Elements of the flat vector that are broadcast together."""
BY_NAME = "inner_optimizer_by_name"
"""A save of this kind; a replica with one process numbers the parameters instead."""


class Operation(IntEnum):
    """What the leader announces."""

    END = 0
    """Back to the training loop."""
    BEGIN = 1
    FAILED = 2
    READ = 3
    WRITE = 4
    EVALUATE = 5
    FINAL = 6
    RESET = 7
    SAVE = 8
    LOAD = 9
    COMPARE = 10
    NOTHING = 11
    """The leader waits for others, and has not forgotten its ranks."""


class Ranks:
    """One rank's part in everything that the ranks of a replica do together."""

    def __init__(self, channel: Channel, model: nn.Module, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.channel = channel
        self.model = model
        self._counted = Word()
        self._on_counted: Callable[[Word], None] = lambda heard: None
        self._thread = threading.get_ident()
        self._said_s = self._clock.monotonic()

    # -- what a step has counted, told with the next word -----------------------------------------

    def count(
        self, *, tokens: int, loss: Number, on_more: Callable[[int], None] = lambda tokens: None
    ) -> Tensor:
        """Remember a step of this rank; the loss to report for it, a tensor of one element.

        On a GPU it is the mean over all ranks' tokens, computed there without waiting for it. On
        the CPU it *becomes* that with the next word. ``on_more`` is told the other ranks' tokens
        with the next word.
        """
        mean = whole(loss).detach().float().reshape(()).clone()
        elsewhere = on_gpu(mean)
        if elsewhere:
            both = torch.stack([mean * tokens, mean.new_full((), tokens)])
            dist.all_reduce(both)
            mean = both[0] / both[1]
        weighted = 0.0 if elsewhere or not tokens else float(mean) * tokens
        self._counted = Word(tokens=tokens, loss=weighted)

        def on_counted(heard: Word) -> None:
            if not elsewhere and heard.tokens:
                mean.fill_(heard.loss / heard.tokens)
            on_more(int(heard.tokens) - tokens)

        self._on_counted = on_counted
        return mean

    # -- words -----------------------------------------------------------------------------------

    def say(self, word: Word) -> Word:
        """All ranks' word of now. Raises :class:`ReplicaError` if another rank has failed."""
        assert threading.get_ident() == self._thread, "only the training loop's thread may talk"
        self._said_s = self._clock.monotonic()
        counted, self._counted = self._counted, Word()
        on_counted, self._on_counted = self._on_counted, lambda heard: None
        heard = self.channel.say(word + counted)
        on_counted(heard)
        if heard.failed:
            self._raise(self.channel.texts(""))
        return heard

    def keep_listening(self) -> None:
        """Tell the followers, who do not wait for ever, that the leader is still there. Does
        nothing in other threads than the training loop's."""
        mine = threading.get_ident() == self._thread
        if mine and self._clock.monotonic() - self._said_s > KEEP_LISTENING_S:
            self.say(Word(operation=Operation.NOTHING))

    def heed_failure(self, heard: Word) -> None:
        """Raise :class:`ReplicaError` if the leader has failed."""
        if heard.operation == Operation.FAILED:
            self._raise(self.channel.texts(""))

    def _raise(self, texts: list[str]) -> None:
        self.channel.broken = True
        who = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise ReplicaError(f"another rank of this replica has failed: {who}")

    def compare(self, model_hash: str) -> None:
        """See that all ranks have the same model; raises :class:`ModelMismatch` on all of them."""
        found = self.channel.texts(model_hash)
        if len(set(found)) > 1:
            self.channel.broken = True
            raise ModelMismatch(f"expected one model on all ranks of the replica, found {found}")

    def together(self, operation: Operation, work: Callable[[], T]) -> Callable[[], T]:
        """``work``, announced first."""

        def announced() -> T:
            self.say(Word(operation=operation))
            return work()

        return announced

    # -- failing ---------------------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks why this one cannot go on, if they still listen."""
        if self.channel.broken:
            return
        word = Word(operation=Operation.FAILED) if self.channel.is_leader else Word(failed=1)
        try:
            self.channel.say(word, timeout_s=FAREWELL_S)
            self.channel.texts(f"{type(error).__name__}: {error}")
        except ReplicaError:
            log.warning("the other ranks of this replica could not be told of the error")
        self.channel.broken = True

    @contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise


class SharedLayout(Layout):
    """A layout whose flat vector is the leader's, and whose model is every rank's."""

    def __init__(self, model: nn.Module, ranks: Ranks, **cut: Any) -> None:
        super().__init__(model, **cut)
        self._ranks = ranks

    def read(self, fragment: int | None = None) -> Tensor:
        """As :meth:`Layout.read`; on the leader only."""
        self._announce(Operation.READ, fragment)
        return super().read(fragment)

    def write(self, vector: Tensor, fragment: int | None = None) -> None:
        """As :meth:`Layout.write`; on the leader only, and then in every rank's model."""
        self._announce(Operation.WRITE, fragment)
        vector = vector.contiguous()
        first = self.span(fragment).start
        for bucket in self._buckets(fragment):
            piece = vector[bucket[0][0].offset - first : bucket[-1][0].stop - first]
            if piece.numel():
                self._ranks.channel.broadcast(piece)
        super().write(vector, fragment)

    def put_progress(
        self, into: Tensor, base: Tensor, fragment: int | None = None, *, add: bool
    ) -> None:
        """As :meth:`Layout.put_progress`; on the leader only. To followers it is a read."""
        self._announce(Operation.READ, fragment)
        super().put_progress(into, base, fragment, add=add)

    def follow_read(self, fragment: int | None) -> None:
        """A follower's part in :meth:`read`: none, unless the parameters are sharded."""
        for _, parameter in self._held(fragment):
            if named_parameters.is_sharded(parameter):
                named_parameters.read(parameter)

    def follow_write(self, fragment: int | None) -> None:
        """A follower's part in :meth:`write`; it never holds more than a bucket of the vector."""
        for bucket in self._buckets(fragment):
            first = bucket[0][0].offset
            piece = torch.empty(bucket[-1][0].stop - first, dtype=torch.float32)
            if piece.numel():
                self._ranks.channel.broadcast(piece)
            for slot, parameter in bucket:
                held = piece[slot.offset - first : slot.stop - first].view(slot.shape)
                named_parameters.write(parameter, held)

    def _announce(self, operation: Operation, fragment: int | None) -> None:
        argument = -1 if fragment is None else fragment
        self._ranks.say(Word(operation=operation, argument=argument))

    def _buckets(self, fragment: int | None) -> Iterator[list[tuple[Slot, nn.Parameter]]]:
        bucket: list[tuple[Slot, nn.Parameter]] = []
        size = 0
        for slot, parameter in self._held(fragment):
            if bucket and size + slot.numel > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append((slot, parameter))
            size += slot.numel
        yield bucket


class SharedInner(Inner):
    """The inner optimizer of all ranks, saved whole and by the parameters' names, so that the
    replica may be launched again with another number of ranks. The caller's ``stateful`` are saved
    as the leader has them, and all ranks get those back."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stateful: Mapping[str, Stateful] | None,
        ranks: Ranks,
    ) -> None:
        super().__init__(optimizer, stateful)
        self._ranks = ranks

    def save(self) -> dict[str, Any]:
        self._ranks.say(Word(operation=Operation.SAVE))
        own = super().save()
        del own["inner_optimizer"]
        return {BY_NAME: self._optimizer_state(), **own}

    def load(self, trees: Mapping[str, Any]) -> None:
        """Restore what :meth:`save` gave, on all ranks."""
        self._ranks.say(Word(operation=Operation.LOAD))
        self._ranks.channel.text(json.dumps(BY_NAME in trees))
        if BY_NAME in trees:
            self._load_optimizer(trees[BY_NAME])
        own = {name: tree for name, tree in trees.items() if name in self._stateful}
        skeleton, tensors = split_tree(own)
        packed = torch.frombuffer(bytearray(save_safetensors(tensors)), dtype=torch.uint8)
        self._ranks.channel.text(json.dumps({"tree": skeleton, "size_bytes": packed.numel()}))
        self._ranks.channel.broadcast(packed)
        super().load(own)

    def reset(self) -> None:
        self._ranks.say(Word(operation=Operation.RESET))
        super().reset()

    def follow(self, operation: Operation) -> None:
        """A follower's part."""
        if operation == Operation.RESET:
            super().reset()
        elif operation == Operation.SAVE:
            self._optimizer_state()
        else:
            assert operation == Operation.LOAD, operation
            if json.loads(self._ranks.channel.text()):
                self._load_optimizer({})
            said = json.loads(self._ranks.channel.text())
            packed = torch.empty(said["size_bytes"], dtype=torch.uint8)
            self._ranks.channel.broadcast(packed)
            tensors = load_safetensors(packed.numpy().tobytes())
            super().load(join_tree(said["tree"], tensors))

    def _optimizer_state(self) -> dict[str, Any]:
        """Whole and on the CPU on the leader, empty elsewhere."""
        self._reshard()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(self._ranks.model, self.optimizer, options=options)

    def _reshard(self) -> None:
        """A forward pass may have left whole parameters, which the optimizer does not know."""
        for module in named_parameters.sharding_modules(self._ranks.model):
            module.reshard()

    def _load_optimizer(self, whole_state: Mapping[str, Any]) -> None:
        """The leader's state, each rank's part of it."""
        self._reshard()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(
            self._ranks.model, self.optimizer, dict(whole_state), options=options
        )


def on_gpu(tensor: Tensor) -> bool:
    """Whether reading its value would make this process wait for a device."""
    return tensor.is_cuda


def whole(number: Number) -> Tensor:
    """A loss or a norm as a plain tensor; FSDP2's norms are spread over the ranks, which must then
    all call this."""
    tensor = number if isinstance(number, Tensor) else torch.tensor(number)
    return named_parameters.read(tensor)
