"""Renders a picture as text for a terminal. Pure.

Sizes are decimal, as stores bill them. Waiting times are reported by the replicas' telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diloco.inspection.findings import findings
from diloco.inspection.picture import MARKS, Picture, RoundPicture
from diloco.inspection.tables import columns, size
from diloco.protocol.group_document import PROTOCOL
from diloco.protocol.settings import GroupSettings
from diloco.protocol.telemetry import PHASES

GRID_WIDTH = 100
"""Rounds per line of the grid."""


def render(picture: Picture, *, all_settings: bool = False) -> str:
    """Return the picture as text; ``all_settings`` shows the default settings too."""
    sections = (
        _head(picture),
        _settings(picture, all_settings),
        _members(picture),
        _rounds(picture),
        _grid(picture),
        _waits(picture),
        _evaluations(picture),
        _checkpoints(picture),
        _sizes(picture),
        _health(picture),
    )
    return "\n\n".join("\n".join(lines) for section in sections if (lines := list(section))) + "\n"


def _head(picture: Picture) -> Iterator[str]:
    document, newest = picture.document, picture.newest
    yield f"run {document.run_id} {document.name!r} at {picture.uri}"
    workload = ", ".join(f"{name} {value}" for name, value in document.workload.items())
    yield f"protocol {PROTOCOL}, settings {document.fingerprint[:16]}, workload: {workload}"
    settings = document.settings
    if newest is None:
        yield f"no round of {settings.total_rounds:,} is committed"
    else:
        yield (
            f"{newest.committed_total:,} of {settings.total_rounds:,} rounds committed, "
            f"{newest.round - newest.committed_total:,} void, {newest.tokens_total:,} tokens"
        )
    if picture.final is not None:
        final = picture.final.manifest
        yield (
            f"final: {final.reason} after round {final.round}, by {final.writer}, "
            f"{final.weights.key} ({size(final.weights.size_bytes)})"
        )


def _settings(picture: Picture, all_settings: bool) -> Iterator[str]:
    settings = picture.document.settings
    chosen = settings.to_dict() if all_settings else changed_settings(settings)
    yield "settings" if all_settings else "settings that are not the default"
    width = max(map(len, chosen), default=0)
    for name, value in chosen.items():
        yield (
            f"  {name.ljust(width)}  {value:g}"
            if isinstance(value, float)
            else (f"  {name.ljust(width)}  {value}")
        )
    if not chosen:
        yield "  none"


def changed_settings(settings: GroupSettings) -> dict[str, object]:
    """Return the settings that differ from their defaults."""
    defaults = GroupSettings().to_dict()
    return {name: value for name, value in settings.to_dict().items() if value != defaults[name]}


def _members(picture: Picture) -> Iterator[str]:
    rows = [("role", "lease", "state", "round", "step", "tokens", "loss", "starts", "saved", "is")]
    for member in picture.members:
        beat = member.beat
        saved = picture.saved_states.get(beat.replica)
        rows.append(
            (
                f"{beat.role} {beat.replica}",
                member.life,
                beat.state,
                f"{beat.round:,}",
                f"{beat.step:,}",
                f"{beat.tokens:,}",
                _loss(beat.loss),
                str(picture.incarnations.get(beat.replica, 1)),
                "-" if saved is None else f"round {saved}",
                f"{beat.incarnation} on {beat.host or '?'} {beat.device} {beat.message}".rstrip(),
            )
        )
    yield "members"
    if len(rows) == 1:
        yield "  none yet"
    else:
        yield from _indented(columns(rows, left=(0, 1, 2, 9)))


def _rounds(picture: Picture) -> Iterator[str]:
    head = (
        "round",
        "fragment",
        "state",
        "mode",
        "in",
        "loss",
        "tokens",
        "payloads",
        "plan by",
        "commit by",
        "remarks",
    )
    rows = [head, *map(_round, picture.rounds)]
    yield (
        f"rounds {picture.rounds[0].round} to {picture.rounds[-1].round}"
        if (picture.rounds)
        else "no rounds to show"
    )
    if picture.rounds:
        yield from _indented(columns(rows, left=(2, 3, 10)))


def _round(shown: RoundPicture) -> tuple[str, ...]:
    plan, commit = shown.plan, shown.commit
    remarks = [f"void: {commit.void}"] if commit and commit.void else []
    remarks += [f"{r.replica} {r.kind}: {r.reason}" for r in (plan.refused if plan else ())]
    return (
        str(shown.round),
        str(shown.fragment),
        shown.state + (", last" if commit and commit.last else ""),
        plan.mode if plan else "-",
        str(len(shown.contributors) if plan or commit else len(shown.arrived)),
        _loss(commit.loss if commit else None),
        f"{shown.tokens:,}",
        size(shown.payload_bytes),
        str(plan.planner.replica) if plan else "-",
        str(commit.committer.replica) if commit else "-",
        "; ".join(remarks),
    )


def _grid(picture: Picture) -> Iterator[str]:
    replicas, rounds = picture.replicas, picture.rounds
    if not replicas or not rounds:
        return
    yield "contributions"
    used: set[str] = set()
    for start in range(0, len(rounds), GRID_WIDTH):
        part = rounds[start : start + GRID_WIDTH]
        yield f"  {'':12}{_ruler(part)}"
        for replica in replicas:
            marks = "".join(picture.mark(replica, shown) for shown in part)
            used |= set(marks)
            yield f"  replica {replica:<4}{marks}"
    yield "  " + "  ".join(f"{mark} {word}" for mark, word in MARKS.items() if mark in used)


def _ruler(rounds: Sequence[RoundPicture]) -> str:
    """Return round numbers above the first column and every tenth round."""
    line = ""
    for index, shown in enumerate(rounds):
        text = str(shown.round)
        if (index == 0 or shown.round % 10 == 0) and len(line) <= index:
            line = line.ljust(index) + text
            line += " "
    return line.rstrip()


def _waits(picture: Picture) -> Iterator[str]:
    replicas = sorted({r.identity.replica for r in picture.reports})
    if not replicas:
        return
    background = any(r.report.background for r in picture.reports)
    rows = [("replica", "rounds", *PHASES, "waited", *(("behind",) if background else ()), "moved")]
    for replica in replicas:
        reports = [r.report for r in picture.reports if r.identity.replica == replica]
        mean_s = {p: sum(r.phases.get(p, 0.0) for r in reports) / len(reports) for p in PHASES}
        background_s = sum(sum(r.background.values()) for r in reports) / len(reports)
        total = sum(mean_s.values())
        mean_bytes = sum(r.bytes_up + r.bytes_down for r in reports) / len(reports)
        rows.append(
            (
                str(replica),
                str(len(reports)),
                *(f"{mean_s[phase]:.2f}" for phase in PHASES),
                f"{1 - mean_s['compute'] / total:.1%}" if total else "-",
                *((f"{background_s:.2f}",) if background else ()),
                size(mean_bytes),
            )
        )
    yield "seconds a round, by replica; waited: all but compute" + (
        "; behind: under computation" if background else ""
    )
    yield from _indented(columns(rows, left=()))


def _evaluations(picture: Picture) -> Iterator[str]:
    if picture.evaluations:
        shown = picture.evaluations[-10:]
        yield "evaluations of the global weights, nats per token"
        yield "  " + ", ".join(f"round {e.round}: {e.loss:.4f}" for e in shown)


def _checkpoints(picture: Picture) -> Iterator[str]:
    if not picture.checkpoints:
        return
    yield "checkpoints"
    for checkpoint in picture.checkpoints:
        manifest, missing = checkpoint.manifest, checkpoint.missing
        state = "complete" if not missing else "swept"
        yield (
            f"  {manifest.round:>6}  {state:8}  {size(checkpoint.size_bytes):>9}  "
            f"{manifest.weights_digest[:12]}  by {manifest.writer}"
        )


def _sizes(picture: Picture) -> Iterator[str]:
    yield (
        "in the bucket"
        if picture.whole
        else (
            "in the bucket: the rounds above, checkpoints, states and results (--sizes: everything)"
        )
    )
    rows = [(kind, f"{s.objects:,}", size(s.bytes)) for kind, s in picture.sizes.items()]
    yield from _indented(columns([("kind", "objects", "bytes"), *rows], left=(0,)))


def _health(picture: Picture) -> Iterator[str]:
    found = findings(picture)
    problems = sum(finding.problem for finding in found)
    yield "health: " + (f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems")
    for finding in found:
        yield f"  {'!' if finding.problem else '-'} {finding.text}"


def _indented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:#.4g}"
