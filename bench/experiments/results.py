"""Results: one JSON line per (arm, seed), appended when it is done, and the table made of them.

A killed script goes on where it was: what is in the file with the same definition is not done
again. A line that was torn by the kill is dropped.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.experiments.arms import Arm

Result = dict[str, Any]
REFERENCE = "diloco"


def read(path: Path) -> list[Result]:
    """All whole lines of a results file; none if there is no file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def append(path: Path, result: Result) -> None:
    """Add a line, after ending one that a kill has torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(result) + "\n")


def remaining(
    arms: Sequence[Arm], seeds: Sequence[int], results: Iterable[Result]
) -> Iterator[tuple[Arm, int]]:
    """What is still to be done: arm by arm, every seed of an arm before the next arm."""
    done = [result["definition"] for result in results]
    for arm in arms:
        for seed in seeds:
            if arm.definition(seed) not in done:
                yield arm, seed


def newest(results: Iterable[Result]) -> dict[tuple[str, int], Result]:
    """The last line of each (arm, seed)."""
    return {(result["arm"], result["seed"]): result for result in results}


def table(arms: Sequence[Arm], results: Iterable[Result]) -> str:
    """Markdown: mean and standard deviation over seeds, and against DiLoCo seed by seed."""
    found = newest(results)
    rows = [
        "| arm | tokens | seeds | held-out loss, nats per byte | perplexity against DiLoCo |",
        "| --- | --- | --- | --- | --- |",
    ]
    missing = []
    for arm in arms:
        losses = {s: r["loss"] for (name, s), r in found.items() if name == arm.name}
        if not losses:
            missing.append(arm.title)
            continue
        tokens = next(r["tokens"] for (name, _), r in found.items() if name == arm.name)
        reference = {s: r["loss"] for (name, s), r in found.items() if name == REFERENCE}
        against = [100 * (math.exp(losses[s] - reference[s]) - 1) for s in losses if s in reference]
        versus = "" if arm.name == REFERENCE or not against else f"{spread(against, '+.2f')} %"
        rows.append(
            f"| {arm.title} | {tokens / 1e6:.2f} M | {len(losses)} "
            f"| {spread(list(losses.values()), '.4f')} | {versus} |"
        )
    rows += ["", f"Not measured: {', '.join(missing)}."] if missing else []
    return "\n".join(rows)


def tuning_table(results: Iterable[Result]) -> str:
    """The runs that chose the learning rates, best first."""
    runs = [r for (name, _), r in newest(results).items() if name.startswith("tune ")]
    rows = ["| run | held-out loss |", "| --- | --- |"]
    rows += [
        f"| {run['arm'].removeprefix('tune ')} | {run['loss']:.4f} |"
        for run in sorted(runs, key=lambda run: (run["arm"].split()[1], run["loss"]))
    ]
    return "\n".join(rows)


def spread(values: Sequence[float], form: str) -> str:
    """mean ± sample standard deviation; the mean alone of one value."""
    mean = format(statistics.fmean(values), form)
    if len(values) < 2:
        return mean
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}"
