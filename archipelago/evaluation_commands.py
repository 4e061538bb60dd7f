"""Commands about evaluations of checkpoints."""

from __future__ import annotations

import argparse

from archipelago import terminal
from archipelago.client import Client
from archipelago.errors import NotFound
from archipelago.evaluation_rows import Evaluation

PLAN_FIELDS = (
    *("data", "tokens", "tasks", "examples", "every"),
    *("backend", "hardware", "credential", "timeout_s", "max_attempts"),
)


def evaluations(client: Client, options: argparse.Namespace) -> int:
    """Print the results, newest round first, or the logs of one evaluation."""
    run = client.find(options.run)
    if options.log is not None:
        attempts = client.evaluation_attempts(run.id, options.log)
        for attempt in attempts:
            ended = attempt.cause or ("running" if attempt.launched_at else "launching")
            print(terminal.safe(f"# {attempt.launch_key}: {ended} {attempt.message}".rstrip()))
            print(terminal.block(attempt.log or "(no output yet)"))
        return 0
    rows = client.evaluations(run.id)
    if options.json:
        return terminal.print_json([row.raw for row in rows])
    table = [
        [str(row.id), row.plan, str(row.round), row.state, results(row) or row.message or "-"]
        for row in rows
    ]
    return terminal.print_table(["ID", "EVALUATION", "ROUND", "STATE", "RESULT"], table)


def results(row: Evaluation) -> str:
    """``loss 2.31, perplexity 10.1``."""
    known = [metric for metric in row.metrics if metric.value is not None]
    return ", ".join(f"{metric.name} {metric.value:.4g}" for metric in known)


def evaluate(client: Client, options: argparse.Namespace) -> int:
    """Evaluate a checkpoint now, or cancel that."""
    run = client.find(options.run)
    plans = [plan.name for plan in client.evaluation_plans(run.id)]
    if options.plan is None and len(plans) != 1:
        known = ", ".join(plans) or "none yet; add one with archipelago evaluation-plan"
        raise NotFound(f"expected the name of an evaluation of the run: {known}")
    name = options.plan or plans[0]
    if options.cancel:
        if options.round is None:
            raise ValueError("expected --round with --cancel")
        done = client.cancel_evaluation(run.id, name, options.round)
        state = "is being cancelled" if done.changed else "is not active"
    else:
        done = client.evaluate(run.id, name, options.round)
        state = "queued" if done.changed else "is queued, runs or was done already"
    where = "newest checkpoint" if options.round is None else f"round {options.round}"
    print(terminal.safe(f"{run.name}, {name} of {where}: {state}"))
    return 0


def evaluation_plan(client: Client, options: argparse.Namespace) -> int:
    """List what is evaluated of a run, or add, change or remove an evaluation."""
    run = client.find(options.run)
    given = {name: getattr(options, name) for name in PLAN_FIELDS}
    if options.plan is None:
        plans = client.evaluation_plans(run.id)
        if options.json:
            return terminal.print_json([plan.raw for plan in plans])
        table = [
            [
                plan.name,
                plan.data or "own held-out data",
                ",".join(plan.tasks) or "-",
                f"every {plan.every}" if plan.every else "on request",
                f"{plan.backend} {plan.hardware}",
            ]
            for plan in plans
        ]
        return terminal.print_table(["EVALUATION", "DATA", "TASKS", "CHECKPOINTS", "ON"], table)
    if options.remove:
        done = client.remove_evaluation_plan(run.id, options.plan)
        state = "removed" if done.changed else "not found"
        print(terminal.safe(f"{run.name}, {options.plan}: {state}"))
        return 0
    before = [plan for plan in client.evaluation_plans(run.id) if plan.name == options.plan]
    body = {name: getattr(before[0], name) for name in PLAN_FIELDS} if before else {}
    body |= {name: value for name, value in given.items() if value is not None}
    saved = client.save_evaluation_plan(run.id, {**body, "name": options.plan})
    print(terminal.safe(f"{run.name}, {saved.name}: {'changed' if before else 'added'}"))
    return 0
