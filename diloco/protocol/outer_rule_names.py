"""The names of outer rules that a group can select; :mod:`diloco.model.outer_rules` has the rules.

Other packages add rules as entry points. Only their names are read here, so that the control plane
can offer a rule without importing it.
"""

from __future__ import annotations

from importlib import metadata

ENTRY_POINTS = "diloco.outer_rules"
"""Group of the entry points."""
NESTEROV = "nesterov"


def rule_names() -> tuple[str, ...]:
    """Return the built-in rule and the rules of installed packages."""
    installed = {entry_point.name for entry_point in metadata.entry_points(group=ENTRY_POINTS)}
    return (NESTEROV, *sorted(installed - {NESTEROV}))
