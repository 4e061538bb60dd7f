"""State trees as JSON plus tensors, never pickled (invariant I7).

A tree is the result of ``state_dict()``: dicts, lists, tuples, strings, numbers, booleans, None and
tensors. It is split into a JSON skeleton and a flat dict of tensors for safetensors; the error for
any other value names its path and type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def split_tree(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return (JSON-compatible skeleton, tensors by name). Raises :class:`TypeError` for other
    values. The tensors are those of the tree, not copies, on its devices.

    Containers are tagged, because JSON has neither tuples nor numeric keys, and optimizer states
    have both.
    """
    tensors: dict[str, Tensor] = {}
    return _split(tree, "state", tensors), tensors


def join_tree(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the tree; the inverse of :func:`split_tree`. Raises :class:`ValueError` if skeleton
    and tensors do not match."""
    if not isinstance(skeleton, dict):
        return skeleton
    match skeleton:
        case {"tensor": str(name)}:
            if name not in tensors:
                raise ValueError(f"expected a tensor {name!r}, found none")
            return tensors[name]
        case {"list": list(items)}:
            return [join_tree(item, tensors) for item in items]
        case {"tuple": list(items)}:
            return tuple(join_tree(item, tensors) for item in items)
        case {"dict": list(items)}:
            return dict(_pair(item, tensors) for item in items)
    raise ValueError(f"expected a state tree, found an object with {sorted(skeleton)}")


def _pair(item: Any, tensors: Mapping[str, Tensor]) -> tuple[str | int, Any]:
    match item:
        case [str() | int() as key, value]:
            return key, join_tree(value, tensors)
    raise ValueError(f"expected a key and its value in a state tree, found {type(item).__name__}")


def _split(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, list | tuple):
        items = [_split(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{where}: expected keys of str or int, found {key!r}")
        return {
            "dict": [[key, _split(item, f"{where}.{key}", tensors)] for key, item in value.items()]
        }
    raise TypeError(f"{where}: expected plain values and tensors, found {type(value).__name__}")
