"""Write ``docs/reference/settings.md`` from the schema of the group settings and from ``join``.

``scripts/settings_reference.py`` writes the page; with ``--check``, as in ``make check``, it fails
when the page is stale.
Names, defaults, bounds and help texts of the settings come from
:mod:`diloco.protocol.settings`. Types and defaults of ``join`` come from its signature, which is
parsed rather than imported, because :mod:`diloco.group` needs torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from diloco.protocol import control_pace  # noqa: E402
from diloco.protocol.settings import SECTIONS, SettingSpec, setting_fields  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "settings.md"

HEADER = """\
# Reference: group settings and `join`

<!-- Written by scripts/settings_reference.py: change the schema, then run the script. -->

A group's settings are fixed when the group is created. They are stored in `group.json`, which every
replica reads; a replica cannot override them. There are five ways to set them:

| where | how |
| --- | --- |
| submit form | the field with the label given in the tables below |
| `run.toml` and [the API](../api.md) | a key of `[settings]` |
| `python -m diloco.init` | an option: `sync_every` is `--sync-every` |
| `python -m diloco.init --settings FILE` | a key of a JSON object |
| Python | a keyword of `diloco.GroupSettings` |

A setting that is left out has its default. A value out of range raises `SettingsError`, which names
the setting, the expected and the found value. The [glossary](../glossary.md) explains the terms.
"""

JOIN = """
## `diloco.join`

`diloco.join(uri, model, inner_optimizer, *, ...)` makes this process a replica of the group at
`uri`, which it creates if `settings` are given, and returns a `Group`, a context manager. On return
the model holds the global weights. [Train without the dashboard](../library.md) shows it in use.

| parameter | type | default | meaning |
| --- | --- | --- | --- |
"""

JOIN_PARAMETERS = {
    "uri": "Rendezvous URI: the folder or bucket prefix that holds `group.json`.",
    "model": "The model. Its parameters are overwritten with the group's global weights.",
    "inner_optimizer": "The optimizer of the local steps, or several that divide the parameters."
    " Their state is saved for a relaunch.",
    "replica": "Replica number, from 0. Left out: the environment variable `REPLICA_RANK`. Without"
    " either, a number is taken from the store: one whose process has ended or is dead, so that its"
    " state is resumed, else an unused one.",
    "settings": "Creates the group with these settings if there is none; refuses a group with"
    " others. Left out: the group must exist.",
    "fresh": "Requires a new run. `True`: this call must create the group. A text: the name of the"
    " run, which all its replicas pass. Nothing is deleted.",
    "buffers": "Buffers that training changes (BatchNorm): `average` them in each round, or leave"
    " each replica its own (`local`). Left out: a change is an error that explains this.",
    "publish": "The final weights: the whole `model`, or only what replicas exchange (`exchanged`),"
    " so that frozen parameters never leave the machine.",
    "evaluate": "Called with the global weights in the model, on one replica at a time; returns the"
    " evaluation loss.",
    "config": "JSON values that are stored beside the final weights.",
    "sample": "Called once by the replica that publishes the final weights; returns a sample of"
    " text, which is stored beside them.",
    "heartbeat_interval_s": "Seconds between lease renewals. Left out: a fifth of"
    " `heartbeat_timeout_s`.",
    "telemetry_interval_s": "Seconds between telemetry segments. The first one is written after"
    " 2 s; then the time between two doubles up to this.",
    "stateful": "Objects with `state_dict` and `load_state_dict` (data loader, scheduler, ...) that"
    " are saved and restored together with the inner optimizer.",
    "progress": "`True` prints what the replica waits for and one line per round, or a bar on a"
    " terminal where tqdm is installed; a function is called with a `RoundProgress`.",
    "graceful_shutdown": "Lets another thread request a graceful shutdown before `join` has"
    " returned.",
    "startup": "Times before `join` (imports, data), reported as the phases `bootstrap` and"
    " `start`.",
    "store": "An open store to use instead of opening `uri`.",
    "clock": "A clock to use instead of the system's, for tests.",
}


def render() -> str:
    """Return the text of the page."""
    return HEADER + "".join(_sections()) + JOIN + "".join(_join_rows())


def stale() -> list[str]:
    """Return one line when the page differs from the schema, else nothing."""
    if PAGE.exists() and PAGE.read_text() == render():
        return []
    return [f"{PAGE.relative_to(ROOT)}: stale; run .venv/bin/python scripts/settings_reference.py"]


def _sections() -> Iterator[str]:
    for key, title in SECTIONS.items():
        yield f"\n## {title}\n\n| setting | label | default | values | meaning |\n"
        yield "| --- | --- | --- | --- | --- |\n"
        for spec in setting_fields():
            if spec.section == key:
                yield _row(
                    f"`{spec.name}`", spec.label, f"`{spec.default}`", _values(spec), spec.help
                )


def _values(spec: SettingSpec) -> str:
    if spec.kind == "choice":
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    if spec.maximum is None:
        bounds = f"{_number(spec.minimum)} or more"
    else:
        bounds = f"{_number(spec.minimum)} to {_number(spec.maximum)}"
    zero = f"; 0: {spec.zero}" if spec.zero else ""
    return f"{bounds} {spec.unit}".rstrip() + zero


def _number(value: float | None) -> str:
    return f"{value:,.10g}"


def _join_rows() -> Iterator[str]:
    path = ROOT / "diloco" / "group.py"
    (function,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "join"
    )
    arguments = function.args
    defaults = [*[None] * len(arguments.args), *arguments.kw_defaults]
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    if set(names) != set(JOIN_PARAMETERS):
        differ = ", ".join(sorted(set(names) ^ set(JOIN_PARAMETERS)))
        raise ValueError(f"JOIN_PARAMETERS and the parameters of join differ: {differ}")
    for argument, default in zip((*arguments.args, *arguments.kwonlyargs), defaults, strict=True):
        kind = ast.unparse(argument.annotation) if argument.annotation else ""
        value = f"`{_default(default)}`" if default else "required"
        yield _row(f"`{argument.arg}`", f"`{kind}`", value, JOIN_PARAMETERS[argument.arg])


def _default(default: ast.expr) -> str:
    """Return the value of a constant instead of its name."""
    if isinstance(default, ast.Name):
        return f"{getattr(control_pace, default.id)}"
    return ast.unparse(default)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        print("\n".join(stale()) or "settings reference: current")
        return bool(stale())
    PAGE.write_text(render())
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
