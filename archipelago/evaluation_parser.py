"""Parsers of the commands about evaluations."""

from __future__ import annotations

from archipelago import evaluation_commands
from archipelago.arguments import Subparsers, counted


def add_evaluation_commands(commands: Subparsers) -> None:
    listed = commands.add_of_run(
        "evaluations", evaluation_commands.evaluations, "print the results of evaluations"
    )
    listed.add_argument(
        "--log", type=counted(0, 2**53), metavar="ID", help="print the logs of this evaluation"
    )
    listed.add_argument("--json", action="store_true", help="print the server's JSON")
    evaluate = commands.add_of_run(
        "evaluate", evaluation_commands.evaluate, "evaluate a checkpoint now"
    )
    evaluate.add_argument("plan", metavar="NAME", nargs="?", help="of an evaluation of the run")
    evaluate.add_argument("--round", type=counted(0, 2**31 - 1), help="default: the newest")
    evaluate.add_argument("--cancel", action="store_true", help="cancel that of --round")
    plan = commands.add_of_run(
        "evaluation-plan",
        evaluation_commands.evaluation_plan,
        "list, add, change or remove what is evaluated of a run's checkpoints",
    )
    plan.add_argument("plan", metavar="NAME", nargs="?", help="leave out to list")
    plan.add_argument("--data", metavar="URI", help="token shards; default: own held-out data")
    plan.add_argument("--tokens", type=counted(0, 10**9), help="0 measures no loss")
    plan.add_argument("--tasks", type=_names, help="lm-eval tasks, separated by commas")
    plan.add_argument("--examples", type=counted(0, 10**6), help="of each task; 0: all")
    plan.add_argument("--every", type=counted(0, 10**4), help="checkpoints; 0: on request")
    plan.add_argument("--backend", help="default: local")
    plan.add_argument("--hardware", help="default: cpu")
    plan.add_argument("--credential", help="name of a credential of the backend")
    plan.add_argument("--timeout", dest="timeout_s", type=counted(60, 604_800), metavar="SECONDS")
    plan.add_argument("--max-attempts", type=counted(1, 10))
    plan.add_argument("--remove", action="store_true", help="evaluate no more")
    plan.add_argument("--json", action="store_true", help="print the server's JSON")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
