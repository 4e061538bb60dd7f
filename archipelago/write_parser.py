"""Arguments of the commands that submit, clone and change runs."""

from __future__ import annotations

from archipelago import read_commands, sweep_commands, tracker_commands, write_commands
from archipelago.arguments import Subparsers, add_every, add_json, counted, usd
from archipelago.frame_parser import add_backend_options


def add_submit_commands(commands: Subparsers) -> None:
    commands.add_local("example", write_commands.example, "print an example run.toml")
    plan = commands.add(
        "plan", write_commands.plan, "estimate traffic and cost of a run without starting it"
    )
    plan.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    plan.add_argument(
        "--offline", action="store_true", help="skip the checks of backends and bucket"
    )
    submit = commands.add(
        "submit", write_commands.submit, "create a run from a document and launch it"
    )
    submit.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    submit.add_argument("--watch", action="store_true", help="then watch the run until it ends")
    submit.add_argument("--key", help="idempotency key: the same key returns the same run")
    submit.add_argument("-q", "--quiet", action="store_true", help="print only the id")
    add_every(submit)
    document = commands.add_of_run(
        "document", read_commands.document, "print the document that creates the same run"
    )
    document.add_argument("--fork", action="store_true", help="start from the newest checkpoint")
    document.add_argument(
        "--round", type=counted(0, 2**31 - 1), help="start from the checkpoint of this round"
    )
    backends = commands.add(
        "backends", read_commands.backends, "list backends, hardware and prices"
    )
    add_backend_options(backends)
    add_json(backends)
    add_json(commands.add("settings", read_commands.settings, "list the group settings"))


def add_sweep_commands(commands: Subparsers) -> None:
    clone = commands.add_of_run(
        "clone", sweep_commands.clone, "launch the same run again with some fields changed"
    )
    clone.add_argument("--name", help="name of the new run")
    clone.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="e.g. inner_lr=1e-3 or pools.0.count=8; can be repeated",
    )
    sweep = commands.add(
        "sweep", sweep_commands.sweep, "create a run for each combination of values"
    )
    sweep.add_argument("file", metavar="RUN.TOML", help="- is standard input")
    for each in (clone, sweep):
        each.add_argument(
            "--over",
            action="append",
            default=[],
            required=each is sweep,
            metavar="FIELD=VALUES",
            help="e.g. 'inner_lr=1e-4, 1e-3' or 'inner_lr=1e-4..1e-2 x5 log'; can be repeated",
        )
        each.add_argument("--parallel", type=counted(0, 100), default=0, help="runs at a time")
        each.add_argument("--budget", type=usd, default=0.0, help="USD of all runs together")
        each.add_argument("--rank", default="eval_loss", metavar="METRIC", help="rank by it")
        each.add_argument("--plan", action="store_true", help="estimate and check only")
        each.add_argument("-q", "--quiet", action="store_true", help="print only the id")
    listed = commands.add("sweeps", sweep_commands.sweeps, "list sweeps, or rank the runs of one")
    listed.add_argument("sweep", nargs="?", metavar="SWEEP", help="id, name or last")
    listed.add_argument("--rank", metavar="METRIC", help="rank by another metric")
    listed.add_argument("-n", "--limit", type=counted(1, 200), default=20)
    add_json(listed)
    stop = commands.add("stop-sweep", sweep_commands.stop_sweep, "stop all runs of a sweep")
    stop.add_argument("sweep", metavar="SWEEP", help="id, name or last")


def add_write_commands(commands: Subparsers) -> None:
    stop = commands.add_of_run(
        "stop", write_commands.stop, "stop a run at its newest round, or stop one replica"
    )
    stop.add_argument("--replica", type=counted(0, 99_999), help="only this replica")
    stop.add_argument("--force", action="store_true", help="end jobs immediately")
    stop.add_argument("--reason", default="", help="reason shown in the run's events")
    several = commands.add(
        "stop-matching", write_commands.stop_matching, "stop all active runs that match a query"
    )
    several.add_argument("query", metavar="QUERY", help="e.g. 'tag:paper rate>10'")
    several.add_argument(
        "--count",
        type=counted(1, 500),
        help="number of runs; read from standard input if left out",
    )
    several.add_argument("--reason", default="", help="reason shown in the runs' events")
    commands.add_of_run("pause", write_commands.pause, "save a checkpoint and release the machines")
    commands.add_of_run("resume", write_commands.resume, "resume a paused or failed run")
    commands.add_of_run("save", write_commands.save, "request a checkpoint of the next round")
    describe = commands.add_of_run(
        "describe", write_commands.describe, "set notes and tags, or archive a run"
    )
    describe.add_argument("--notes", metavar="TEXT")
    describe.add_argument(
        "--tag", action="append", metavar="TAG", help="replaces all tags; '' removes them"
    )
    describe.add_argument("--archive", action="store_true", help="hide the run from lists")
    describe.add_argument("--unarchive", action="store_true")
    delete = commands.add_of_run("delete", write_commands.delete, "delete a finished run")
    delete.add_argument("--name", help="the run's name; read from standard input if left out")
    delete.add_argument("--objects", action="store_true", help="also delete its bucket objects")
    restart = commands.add_of_run(
        "restart", write_commands.restart, "restart a replica under the same number"
    )
    restart.add_argument("replica", type=counted(0, 99_999), metavar="REPLICA")
    restart.add_argument("--force", action="store_true", help="end its job immediately")
    scale = commands.add_of_run(
        "scale", write_commands.scale, "change the number of replicas of a pool"
    )
    scale.add_argument("count", type=counted(0, 1024), metavar="COUNT")
    scale.add_argument(
        "--pool", type=counted(0, 2**31 - 1), help="id of the pool, if the run has several"
    )


def add_tracker_commands(commands: Subparsers) -> None:
    listed = commands.add(
        "trackers", tracker_commands.trackers, "list experiment trackers, or those of a run"
    )
    listed.add_argument("run", metavar="RUN", nargs="?")
    mirror = commands.add_of_run(
        "mirror", tracker_commands.mirror, "mirror the metrics of a run to a tracker"
    )
    mirror.add_argument("tracker", metavar="TRACKER")
    mirror.add_argument("--stop", action="store_true", help="deliver no further points")
