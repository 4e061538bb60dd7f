"""Collective operations of the ranks of one replica: everything that reads or writes the model.

The leader runs the same round loop as a replica of one process. Each operation here first sends a
:class:`StepMessage` that names the :class:`Operation`; the followers receive it and execute their
part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from diloco.clock import SystemClock
from diloco.errors import ModelMismatch, ReplicaError
from diloco.model import named_parameters
from diloco.model.comparison import described, first_difference
from diloco.model.flat_parameters import Layout
from diloco.model.inner_state import BY_NAME, OPTIMIZER, Inner, Stateful
from diloco.model.state_tree import join_tree, split_tree
from diloco.model.tensor_file import TensorWriter
from diloco.ranks.command_channel import CommandChannel, StepMessage
from diloco.ranks.state_share import SavedShares, fitted
from diloco.telemetry.writer import Number
from diloco.training.hooks import RoundHooks
from diloco.training.progress import RoundProgress

log = logging.getLogger(__name__)
T = TypeVar("T")

FAREWELL_S = 5.0
"""For how long a failed rank tries to send its error. Ranks inside a collective of the model cannot
receive it; they see its connections close."""
KEEP_LISTENING_S = 10.0
"""Seconds without an operation after which a waiting leader sends a keep-alive."""


class Operation(IntEnum):
    """The operations that the leader announces."""

    END = 0
    """Return to the training loop."""
    BEGIN = 1
    FAILED = 2
    STATE = 3
    """A call of :class:`~diloco.ranks.rank_progress.RankProgress` or its state, which follows."""
    COPY = 4
    """A copy of the replica state, whose description follows."""
    EVALUATE = 5
    FINAL = 6
    RESET = 7
    SAVE = 8
    LOAD = 9
    COMPARE = 10
    NOTHING = 11
    """Keep-alive of a leader that waits for other replicas."""
    BEFORE_ROUND = 12
    AFTER_ROUND = 13


class Ranks:
    """This rank's side of the collective operations of a replica. ``exchange`` and ``storage`` are
    the channels of the jobs in the background (:mod:`diloco.ranks.jobs`). ``on_leaving`` is called
    with the seconds that remain if another rank has a shutdown request."""

    def __init__(
        self,
        channel: CommandChannel,
        model: nn.Module,
        *,
        exchange: CommandChannel,
        storage: CommandChannel,
    ) -> None:
        self._clock = SystemClock()
        self.channel = channel
        self.exchange = exchange
        self.storage = storage
        self.model = model
        self.on_leaving: Callable[[float], None] = lambda within_s: None
        self._is_announcing = False
        self._counted = StepMessage()
        self._on_counted: Callable[[StepMessage], None] = lambda received: None
        self._thread = threading.get_ident()
        self._last_message_s = self._counted_s = self._clock.monotonic()
        self._leaves_s = float("inf")

    # -- counts of a step, sent with the next message ---------------------------------------------

    def count(
        self, *, tokens: int, loss: Number, on_more: Callable[[int], None] = lambda tokens: None
    ) -> Tensor:
        """Record a step of this rank; return the loss to report for it, a tensor of one element.

        The loss is the mean over the tokens of all ranks. On a GPU it is computed at once, without
        synchronising. On the CPU the tensor gets its value with the next message. ``on_more``
        receives the tokens of the other ranks, also with the next message.
        """
        self._counted_s = self._clock.monotonic()
        mean = to_full_tensor(loss).detach().float().reshape(()).clone()
        elsewhere = on_gpu(mean)
        if elsewhere:
            both = torch.stack([mean * tokens, mean.new_full((), tokens)])
            dist.all_reduce(both)
            mean = both[0] / both[1]
        weighted = 0.0 if elsewhere or not tokens else float(mean) * tokens
        self._counted = StepMessage(tokens=tokens, loss=weighted)

        def on_counted(received: StepMessage) -> None:
            if not elsewhere and received.tokens:
                mean.fill_(received.loss / received.tokens)
            on_more(int(received.tokens) - tokens)

        self._on_counted = on_counted
        return mean

    # -- messages --------------------------------------------------------------------------------

    def all_reduce(self, message: StepMessage) -> StepMessage:
        """Sum the message over all ranks. Raises :class:`ReplicaError` if another rank failed."""
        assert threading.get_ident() == self._thread, "expected the training loop's thread"
        since_s = max(self._last_message_s, self._counted_s)
        self._last_message_s = self._clock.monotonic()
        counted, self._counted = self._counted, StepMessage()
        on_counted, self._on_counted = self._on_counted, lambda received: None
        received = self.channel.all_reduce(message + counted)
        on_counted(received)
        if received.failed:
            self._raise(self.channel.texts(""))
        if received.leaving:
            self._leave(received.leave_within_s / received.leaving, since_s)
        return received

    def _leave(self, within_s: float, since_s: float) -> None:
        """Pass a shutdown request of another rank on, unless it can be the one that was passed on
        before: its share of the time begins once. The rank has written its part of the message
        after the last message, usually after ``since_s``, when this rank has counted its own
        step."""
        now_s = self._clock.monotonic()
        if now_s + within_s < self._leaves_s:
            self._leaves_s = since_s + within_s
            self.on_leaving(max(0.0, self._leaves_s - now_s))

    def keep_alive(self) -> None:
        """Send a keep-alive if none of the leader's messages was recent, so that followers do not
        time out. Does nothing outside the training loop's thread."""
        own = threading.get_ident() == self._thread
        if own and self._clock.monotonic() - self._last_message_s > KEEP_LISTENING_S:
            self.all_reduce(StepMessage(operation=Operation.NOTHING))

    def raise_remote_failure(self, received: StepMessage) -> None:
        """Raise :class:`ReplicaError` if the leader has failed."""
        if received.operation == Operation.FAILED:
            self._raise(self.channel.texts(""))

    def _raise(self, texts: list[str]) -> None:
        self.channel.broken = True
        errors = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise ReplicaError(f"another rank of this replica has failed: {errors}")

    def compare(self, layout: Layout) -> None:
        """Check that all ranks have one model. Raises :class:`ModelMismatch` on all of them, which
        names the first parameter of each rank that differs from the leader's."""
        own = described(layout.tensors, layout.frozen)
        frozen = hashlib.sha256("\n".join(own).encode()).hexdigest()
        hashes = self.channel.texts(f"{layout.model_hash} {frozen}")
        if len(set(hashes)) == 1:
            return
        leaders = json.loads(self.channel.text(json.dumps(own)))
        differences = self.channel.texts(first_difference(leaders, own))
        self.channel.broken = True
        raise ModelMismatch(
            "expected the leader's model on all ranks of the replica: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(differences) if text)
        )

    @contextmanager
    def announced(self, call: str, **arguments: Any) -> Iterator[None]:
        """On the leader, announce a call of its state to the followers before the block, unless the
        block is inside another call. The followers repeat the call."""
        is_outermost = self.channel.is_leader and not self._is_announcing
        if not is_outermost:
            yield
            return
        self.all_reduce(StepMessage(operation=Operation.STATE))
        self.channel.text(json.dumps([call, arguments]))
        self._is_announcing = True
        try:
            yield
        finally:
            self._is_announcing = False

    def announced_call(self) -> tuple[str, dict[str, Any]]:
        """Receive the call that the leader has announced."""
        call, arguments = json.loads(self.channel.text())
        return call, arguments

    def run_on_all_ranks(self, operation: Operation, work: Callable[[], T]) -> Callable[[], T]:
        """Return a function that announces ``operation`` and then calls ``work``."""

        def announced() -> T:
            self.all_reduce(StepMessage(operation=operation))
            return work()

        return announced

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of all channels."""
        for channel in (self.channel, self.exchange, self.storage):
            channel.timeout_s = timeout_s

    def close(self) -> None:
        """Close all channels."""
        for channel in (self.channel, self.exchange, self.storage):
            channel.close()

    # -- failures --------------------------------------------------------------------------------

    def send_error(self, error: BaseException) -> None:
        """Send the error of this rank to the other ranks, if they can still receive it."""
        if self.channel.broken:
            return
        failed = StepMessage(operation=Operation.FAILED)
        message = failed if self.channel.is_leader else StepMessage(failed=1)
        try:
            self.channel.all_reduce(message, timeout_s=FAREWELL_S)
            self.channel.texts(f"{type(error).__name__}: {error}")
        except ReplicaError:
            log.warning("could not send the error to the other ranks of this replica")
        self.channel.broken = True

    @contextmanager
    def sending_errors(self) -> Iterator[None]:
        """Send an exception of the block to the other ranks, and re-raise it."""
        try:
            yield
        except BaseException as error:
            self.send_error(error)
            raise


class SharedInner(Inner):
    """The inner optimizers of all ranks.

    Their full state is saved by parameter name, so that the replica can be relaunched with another
    number of ranks. The caller's ``stateful`` objects are saved from the leader and restored on all
    ranks. ``own`` has this rank's tensors of the optimizers' state by their names in a save,
    ``saved`` the state that :meth:`load` loads, of which each rank has read a share.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Stateful] | None,
        ranks: Ranks,
    ) -> None:
        super().__init__(optimizers, stateful)
        self._ranks = ranks
        self.own: dict[str, Tensor] = {}
        self.saved: SavedShares | None = None

    def save(self) -> dict[str, Any]:
        """Return state dicts by name, whose tensors are those of this rank: the optimizers' can be
        sharded (:mod:`diloco.ranks.state_share`)."""
        self._ranks.all_reduce(StepMessage(operation=Operation.SAVE))
        return {BY_NAME: self._optimizer_state(), **self._save_stateful()}

    def load(self, trees: Mapping[str, Any]) -> None:
        """Restore the caller's objects of ``trees``, and the optimizers from :attr:`saved`, on all
        ranks. Raises :class:`ValueError` if one of them can't be restored, and
        :class:`ReplicaError` if that is so on some ranks only, which would train another model."""
        own = {name: tree for name, tree in trees.items() if name in self._stateful}
        skeleton, tensors = split_tree(own)  # raises before the followers wait for it
        packed = torch.frombuffer(
            bytearray().join(TensorWriter(tensors).parts()), dtype=torch.uint8
        )
        other_form = self.saved is None and any(name.startswith(OPTIMIZER) for name in trees)
        self._ranks.all_reduce(StepMessage(operation=Operation.LOAD))
        errors = [self._load_optimizer()]
        self._ranks.channel.text(json.dumps({"tree": skeleton, "size_bytes": packed.numel()}))
        self._ranks.channel.broadcast(packed)
        errors.append(self._on_all_ranks(lambda: self._load_stateful(own)))
        if other_form:
            errors.append(
                "expected the inner optimizer of several ranks, found that of one process"
            )
        if errors := [error for error in errors if error]:
            raise ValueError("; ".join(errors))

    def reset(self) -> None:
        self._ranks.all_reduce(StepMessage(operation=Operation.RESET))
        super().reset()

    def follow(self, operation: Operation) -> None:
        """Execute the follower's part of an operation."""
        if operation == Operation.RESET:
            super().reset()
        elif operation == Operation.SAVE:
            self._optimizer_state()
        else:
            assert operation == Operation.LOAD, operation
            self._load_optimizer()
            header = json.loads(self._ranks.channel.text())
            packed = torch.empty(header["size_bytes"], dtype=torch.uint8)
            self._ranks.channel.broadcast(packed)

            def load() -> None:
                tensors = load_safetensors(packed.numpy().tobytes())
                self._load_stateful(join_tree(header["tree"], tensors))

            self._on_all_ranks(load)

    def _on_all_ranks(self, work: Callable[[], None]) -> str:
        """Call ``work`` on all ranks; return the error if all of them fail, '' if none does. Raises
        :class:`ReplicaError` if some do."""
        errors = self._errors(work)
        if any(errors) and not all(errors):
            rank, text = next((rank, text) for rank, text in enumerate(errors) if text)
            raise ReplicaError(
                f"expected all ranks to restore the saved state, found on rank {rank}: {text}"
            )
        return errors[0]

    def _errors(self, work: Callable[[], None]) -> list[str]:
        """Call ``work`` on all ranks; return the error of each, '' if there is none."""
        error = ""
        try:
            work()
        except Exception as problem:  # also of an object of the caller
            error = f"{type(problem).__name__}: {problem}"
        return self._ranks.channel.texts(error)

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the state by parameter name, with this rank's tensors."""
        self._reshard()
        state = get_optimizer_state_dict(self._ranks.model, self.optimizers)
        _, self.own = split_tree({BY_NAME: state})
        return state

    def _reshard(self) -> None:
        """Free full parameters that a forward pass can leave, which the optimizer does not have."""
        for module in named_parameters.sharding_modules(self._ranks.model):
            module.reshard()

    def _load_optimizer(self) -> str:
        """Load the saved state tensor by tensor, of which each rank keeps its part; return why it
        does not fit, '' if it does or if there is none."""
        saved, self.saved = self.saved, None
        if saved is None:
            return ""
        self._reshard()
        model, channel = self._ranks.model, self._ranks.channel
        own = get_optimizer_state_dict(model, self.optimizers)
        targets: dict[str, Tensor] = {}
        tree = own

        def fit() -> None:
            nonlocal tree
            tree = fitted(saved, saved.skeleton, own, targets)

        if errors := [error for error in self._errors(fit) if error]:
            return errors[0]  # nothing is changed yet
        for name, target in targets.items():
            named_parameters.write(target, saved.take(name, channel))
        return self._on_all_ranks(lambda: set_optimizer_state_dict(model, self.optimizers, tree))


class SharedRoundHooks(RoundHooks):
    """Hooks that run on all ranks, which have registered the same ones."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def before(self, round: int) -> None:
        if len(self):
            self._ranks.all_reduce(StepMessage(operation=Operation.BEFORE_ROUND, argument=round))
        super().before(round)

    def after(self, progress: RoundProgress) -> None:
        if len(self):
            self._ranks.all_reduce(StepMessage(operation=Operation.AFTER_ROUND))
            self._ranks.channel.text(json.dumps(asdict(progress)))
        super().after(progress)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether reading the value would synchronise with a device."""
    return tensor.is_cuda


def to_full_tensor(number: Number) -> Tensor:
    """Convert a loss or a norm to a plain tensor. FSDP2's norms are sharded, so all ranks must call
    this."""
    tensor = number if isinstance(number, Tensor) else torch.tensor(number)
    return named_parameters.read(tensor)
