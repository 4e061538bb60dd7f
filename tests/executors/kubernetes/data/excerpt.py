"""Takes the definitions of Job and Secret out of the published schemas of Kubernetes.

``pip download --no-deps kubernetes-validate`` gives a wheel with the JSON schemas that its author
makes of the OpenAPI document of each Kubernetes release; the strict ones refuse unknown fields.
``python excerpt.py WHEEL VERSION...`` writes ``VERSION.json`` beside this file: those two and what
they refer to, without descriptions, otherwise as published.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

FOLDER = "kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict"
ROOTS = {"job-batch-v1.json": "job", "secret-v1.json": "secret"}
REFERENCE = "#/$defs/"


def bare(schema: Any) -> Any:
    """Without descriptions and ids, and with references into the same document."""
    if isinstance(schema, list):
        return [bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": REFERENCE + schema["$ref"].rpartition("/")[2]}
    # A description or an id is a text; a property of that name is a schema.
    return {
        key: bare(value)
        for key, value in schema.items()
        if key not in ("description", "$id") or not isinstance(value, str)
    }


def references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].removeprefix(REFERENCE)} if "$ref" in schema else set()
    return own.union(*map(references, schema.values()))


def excerpt(wheel: zipfile.ZipFile, version: str) -> dict[str, Any]:
    folder = FOLDER.format(version=version)
    published = json.loads(wheel.read(f"{folder}/_definitions.json"))["$defs"]
    result = {
        name: bare(json.loads(wheel.read(f"{folder}/{file}"))) for file, name in ROOTS.items()
    }
    wanted = references(list(result.values()))
    while wanted:
        name = wanted.pop()
        if name not in result:
            result[name] = bare(published[name])
            wanted |= references(result[name])
    return result


def main() -> None:
    path, *versions = sys.argv[1:]
    with zipfile.ZipFile(path) as wheel:
        for version in versions:
            lines = (
                f"{json.dumps(name)}: {json.dumps(schema, sort_keys=True)}"
                for name, schema in sorted(excerpt(wheel, version).items())
            )
            text = '{"$defs": {\n' + ",\n".join(lines) + "\n}}\n"
            Path(__file__).with_name(f"{version}.json").write_text(text)


if __name__ == "__main__":
    main()
