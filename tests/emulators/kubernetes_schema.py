"""Kubernetes' own schema of the objects that an executor sends, by the official client's models.

The models are generated from the API's OpenAPI document; with ``fieldValidation=Strict`` the API
server refuses a field that the schema does not have, or a value of another type:
https://kubernetes.io/docs/reference/using-api/api-concepts/#setting-the-field-validation-level
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

MODELS = {"jobs": "V1Job", "secrets": "V1Secret", "pods": "V1Pod"}


def problems(resource: str, given: dict[str, Any], *, is_patch: bool = False) -> list[str]:
    """Violations of the schema in an object, or in a merge patch (which can lack fields)."""
    name = MODELS.get(resource)
    if name is None:
        return []
    model = _model(name)
    unknown = [f'unknown field "{path}"' for path in _unknown(model, given, "")]
    if unknown or is_patch:
        return unknown
    from pydantic import ValidationError

    try:
        model.model_validate(given)
    except ValidationError as error:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    return []


@cache
def _model(name: str) -> Any:
    import kubernetes.client

    return getattr(kubernetes.client, name)


@cache
def _fields(model: Any) -> dict[str, Any]:
    """JSON name of each field -> its type."""
    return {
        field.serialization_alias or field.alias or name: field.annotation
        for name, field in model.model_fields.items()
    }


def _unknown(annotation: Any, given: Any, path: str) -> Iterator[str]:
    """Paths of the fields that the schema does not have."""
    annotation = _bare(annotation)
    if isinstance(given, dict) and hasattr(annotation, "model_fields"):
        known = _fields(annotation)
        for key, value in given.items():
            at = f"{path}.{key}" if path else key
            if key not in known:
                yield at
            else:
                yield from _unknown(known[key], value, at)
    elif isinstance(given, list) and typing.get_origin(annotation) is list:
        for n, value in enumerate(given):
            yield from _unknown(typing.get_args(annotation)[0], value, f"{path}[{n}]")
    elif isinstance(given, dict) and typing.get_origin(annotation) is dict:
        for key, value in given.items():
            yield from _unknown(typing.get_args(annotation)[1], value, f"{path}.{key}")


def _bare(annotation: Any) -> Any:
    """The type without ``Annotated`` and ``None``."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            (annotation, *_) = [a for a in typing.get_args(annotation) if a is not type(None)]
        else:
            return annotation
