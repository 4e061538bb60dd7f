"""``python -m diloco.replica URI``: run one replica, from ``group.json`` to the final weights.

It needs only the rendezvous URI and its replica number in ``REPLICA_RANK``. Under torchrun all
ranks form one replica: each rank trains on a part of the batch, and DistributedDataParallel
averages the gradients. For the exit codes, see :mod:`diloco.exit_codes`.

On SIGTERM or SIGINT the replica contributes its work, saves its state and exits. Set
``DILOCO_LEAVE_WITHIN_S`` to the seconds between SIGTERM and SIGKILL on the machine.
"""

from __future__ import annotations

from diloco.errors import without_module

try:
    import torch
    import torch.distributed as dist
except ModuleNotFoundError as missing:
    raise without_module(missing, "torch", caller=__name__) from None

import argparse
import gc
import logging
import math
import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.clock import SystemClock
from diloco.command_line import add_common_options
from diloco.errors import StopReason
from diloco.exit_codes import EX_TERMINATED, end_process, exit_code_of
from diloco.group import Group, join, replica_number
from diloco.membership.graceful_shutdown import GracefulShutdown
from diloco.model.compiler_import import defer_compiler_import
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore
from diloco.telemetry.startup_timing import startup_of_process
from diloco.training.initial_state import read_document
from diloco.training.sample import sampler_of
from diloco.workloads import load_workload
from diloco.workloads.base import Workload

log = logging.getLogger("diloco.replica")

LEAVE_WITHIN_S = "DILOCO_LEAVE_WITHIN_S"
DEFAULT_LEAVE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Rank:
    """The rank of this process in its replica."""

    number: int = 0
    ranks: int = 1

    def share(self, batch: Any) -> Any:
        """Return this rank's rows of a batch, which is a tensor or a mapping of tensors.

        Raises :class:`ValueError` if the batch size is not a multiple of the number of ranks.
        """
        if self.ranks == 1:
            return batch
        if isinstance(batch, Mapping):
            return {name: self.share(part) for name, part in batch.items()}
        if len(batch) % self.ranks:
            raise ValueError(
                f"batch_size: expected a multiple of the replica's {self.ranks} ranks, "
                f"found {len(batch)}"
            )
        return batch[self.number :: self.ranks]


def begin_rank(device: torch.device) -> Rank:
    """Initialise ``torch.distributed`` if torchrun has started several ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return Rank()
    # gloo for CPU tensors, NCCL for GPU tensors
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Rank(dist.get_rank(), ranks)


def train(group: Group, workload: Workload, model: torch.nn.Module, rank: Rank) -> None:
    """Run the inner loop until the group has ended or the replica leaves."""
    clip = group.settings.grad_clip
    optimizers = group.inner_optimizers
    parameters = [p for p in model.parameters() if p.requires_grad]
    while not group.done:
        lr = workload.lr_at(group.schedule_step)
        for optimizer in optimizers:
            for settings in optimizer.param_groups:
                settings["lr"] = lr
        batch = rank.share(workload.train_batch(group.data_step))
        loss = workload.loss(model, batch)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf"))
        for optimizer in optimizers:
            optimizer.step()
        group.step(tokens=workload.tokens(batch), loss=loss, lr=lr, grad_norm=norm)


def run(uri: str, replica: int) -> int:
    """Train as replica number ``replica``; return the exit code."""
    defer_compiler_import()
    store = open_store(uri, coordinator=True)  # only the group's coordinator creates objects
    clock = SystemClock()
    patient = RetryingStore(store, clock=clock, rng=random.Random(), deadline_s=60.0)
    document = read_document(patient)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rank = begin_rank(device)
    workload = load_workload(document, replica=replica, device=device)
    model = bare = workload.build_model()
    shutdown, startup = GracefulShutdown(clock), startup_of_process(os.environ, clock)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _shutdown_handler(shutdown, leave_within_s(os.environ)))
    if rank.ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(bare)
    group = join(
        uri,
        model=model,
        inner_optimizer=workload.inner_optimizer(model),
        replica=replica,
        buffers=getattr(workload, "buffers", None),
        evaluate=lambda: workload.evaluate(bare),
        config=workload.config(),
        sample=sampler_of(workload, bare),
        graceful_shutdown=shutdown,
        startup=startup,
        store=store,
    )
    with group:
        if attach := getattr(workload, "attach", None):
            attach(group)
        train(group, workload, model, rank)
    return EX_TERMINATED if group.reason == StopReason.LEFT else 0


def leave_within_s(environment: Mapping[str, str]) -> float:
    """Return the seconds for a shutdown after SIGTERM; by default Docker's ten seconds."""
    text = environment.get(LEAVE_WITHIN_S, "")
    try:
        seconds = float(text or DEFAULT_LEAVE_WITHIN_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        log.warning("%s: expected seconds, found %r; ignored", LEAVE_WITHIN_S, text)
        return DEFAULT_LEAVE_WITHIN_S
    return seconds


def _shutdown_handler(shutdown: GracefulShutdown, within_s: float) -> Callable[[int, object], None]:
    def handler(number: int, frame: object) -> None:
        shutdown.request(within_s=within_s, reason=signal.Signals(number).name)

    return handler


def end_rank() -> None:
    """Destroy the process group, if there is one.

    The DistributedDataParallel wrapper refers to the process group in reference cycles. If these
    survive until the interpreter exits, the threads of the process group abort it.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _number() -> int:
    number = replica_number(os.environ)
    if number is None:  # it selects the workload's data before the replica joins
        raise ValueError(
            "REPLICA_RANK: expected a replica number, found none. Start each replica with another "
            "number, e.g. REPLICA_RANK=0 python -m diloco.replica URI"
        )
    return number


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco.replica", description=__doc__)
    add_common_options(parser)
    parser.add_argument("uri", help="rendezvous URI of the run")
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    code = exit_code_of(
        lambda: run(arguments.uri, _number()), uri=arguments.uri, verbose=arguments.verbose
    )
    end_rank()
    return code


if __name__ == "__main__":
    end_process(main())
