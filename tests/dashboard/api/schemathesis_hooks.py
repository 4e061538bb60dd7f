"""Hooks that schemathesis loads into its process: generators of malformed bodies, and a memory
limit. https://schemathesis.readthedocs.io/en/stable/guides/extending/
"""

from __future__ import annotations

import io
import json
import resource
import sys
import zipfile

import schemathesis
from hypothesis import strategies as st

MEMORY_BYTES = 4 * 2**30
"""Limit of the address space; the process needs an eighth of it."""

if sys.platform == "linux":  # other systems do not enforce the limit
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def zipped(names: list[str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return packed.getvalue()


def spoilt(data: bytes, place: int, byte: int) -> bytes:
    """The zip with one byte changed, at that distance from the end, where its directory is."""
    place = len(data) - 1 - place % len(data)
    return data[:place] + bytes([byte]) + data[place + 1 :]


ZIPS = st.lists(
    st.sampled_from(["mine.py", "maß.py", "../mine.py", "/mine.py", "weights.bin", "a/b.py"]),
    max_size=3,
    unique=True,
).map(zipped)
schemathesis.openapi.media_type(
    "application/zip",
    st.one_of(
        ZIPS,
        st.builds(spoilt, ZIPS, st.integers(0, 120), st.integers(0, 255)),
        st.binary(max_size=100),
    ),
)

TOML = "name = {}\n[[pools]]\ncount = {}\n[settings]\nwarmup_steps = {}\n"
YAML = "name: {}\npools:\n- count: {}\nsettings:\n  warmup_steps: {}\n"


def documents(template: str) -> st.SearchStrategy[bytes]:
    """Documents that can be parsed: a malformed body is a 400, which the schema cannot express."""
    return st.builds(
        template.format,
        st.text('aé"\\\n', max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False)),
        st.integers(),
        st.one_of(st.integers(), st.floats().map(str), st.just("1979-05-27")),
    ).map(str.encode)


schemathesis.openapi.media_type("application/toml", documents(TOML))
schemathesis.openapi.media_type("application/yaml", documents(YAML))
