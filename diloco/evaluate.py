"""``python -m diloco.evaluate URI``: measure a checkpoint of a run.

    python -m diloco.evaluate s3://bucket/run
    python -m diloco.evaluate s3://bucket/run --round 50 --data s3://bucket/validation
    python -m diloco.evaluate s3://bucket/run --tasks arc_easy,hellaswag --examples 200

Measures loss and perplexity on held-out tokens, and benchmark tasks with lm-eval, and writes the
result into the run's bucket. It needs no server. The same evaluation of the same weights is done
once: a repeated command prints the stored result. Exit status: 78 for an error that a repetition
does not fix, 75 if the store was unavailable.
"""

from __future__ import annotations

from diloco.errors import without_module

try:
    import torch
except ModuleNotFoundError as missing:
    raise without_module(missing, "torch", caller=__name__) from None

import argparse
import dataclasses
import json
import logging
import random
import sys
from pathlib import Path

from diloco.clock import SystemClock
from diloco.command_line import add_common_options
from diloco.evaluation.measure import evaluate, store_result, stored_result
from diloco.evaluation.weights import find_weights
from diloco.exit_codes import end_process, exit_code_of
from diloco.protocol.evaluation import TOKENS, EvaluationResult, EvaluationSpec
from diloco.store.open import open_store
from diloco.store.retry import RetryingStore
from diloco.training.initial_state import read_document

DEADLINE_S = 60.0
"""How long a request to the store is retried."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print the result."""
    spec = EvaluationSpec(
        data=arguments.data,
        tokens=arguments.tokens,
        tasks=tuple(name for name in arguments.tasks.split(",") if name),
        examples=arguments.examples,
    )
    if arguments.task_folder is not None and not arguments.task_folder.is_dir():
        raise ValueError(f"--task-folder: expected a folder, found {arguments.task_folder}")
    clock = SystemClock()
    store = RetryingStore(
        open_store(arguments.uri), clock=clock, rng=random.Random(), deadline_s=DEADLINE_S
    )
    document = read_document(store)
    weights = find_weights(store, arguments.round)
    result = None if arguments.again else stored_result(store, spec, weights)
    if result is not None:
        print("this evaluation was done before; --again repeats it", file=sys.stderr)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        result = evaluate(
            store,
            document,
            spec,
            weights,
            device=device,
            clock=clock,
            task_folder=arguments.task_folder,
        )
        if not arguments.dry_run:
            result = store_result(store, spec, result)
    _show(result, as_json=arguments.json)
    return 0


def _show(result: EvaluationResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    print(f"round {result.round}, {result.tokens:,} tokens, {result.seconds:.1f} s")
    for metric in result.metrics:
        spread = "" if metric.stderr is None else f"  ± {metric.stderr:.4f}"
        print(f"{metric.name:<32} {metric.value:>12.4f}{spread}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m diloco.evaluate", description="Measure a checkpoint of a run."
    )
    add_common_options(parser)
    parser.add_argument("uri", help="rendezvous URI of the run")
    parser.add_argument(
        "--round", type=int, help="round of the checkpoint (default: the newest weights)"
    )
    parser.add_argument(
        "--data",
        default="",
        help="URI of token shards, whose held-out part is read (default: the held-out data of the "
        "run's workload)",
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="tokens of the data; 0 measures no loss"
    )
    parser.add_argument("--tasks", default="", help="tasks of lm-eval, separated by commas")
    parser.add_argument(
        "--examples", type=int, default=0, help="examples of each task (default: all)"
    )
    parser.add_argument("--task-folder", type=Path, help="folder with definitions of own tasks")
    parser.add_argument("--again", action="store_true", help="repeat an evaluation that was done")
    parser.add_argument("--dry-run", action="store_true", help="write nothing into the bucket")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return exit_code_of(lambda: run(arguments), uri=arguments.uri, verbose=arguments.verbose)


if __name__ == "__main__":
    end_process(main())
