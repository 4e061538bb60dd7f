"""Write chunks of a table as CSV, JSON Lines or Parquet.

CSV (RFC 4180) and JSON Lines write times as ISO 8601 in UTC and omit unknown values. Numbers that
are not finite are ``nan``, ``inf`` and ``-inf``, in JSON as text, because JSON has no such numbers.
In CSV, text that a spreadsheet would take for a formula is prefixed with an apostrophe
(:func:`csv_text`). Parquet has types for all values and needs pyarrow:
https://arrow.apache.org/docs/python/generated/pyarrow.parquet.ParquetWriter.html
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from runs.json_values import iso
from runs.queries.exports import Chunk, Kind

Columns = Mapping[str, Kind]
Writer = Callable[[Columns, Iterable[Chunk]], Iterator[bytes]]

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters of formulas in spreadsheets, including full-width forms."""
_INNER_FORMULA = re.compile(r'([;\t\r\n][ "]*+)(?=[=+\-@＝＋－＠])')

CONTENT_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/jsonl",
    "parquet": "application/vnd.apache.parquet",
}


class NoParquet(Exception):
    """pyarrow is not installed on this server."""


def writer_of(format: str) -> Writer:
    """The writer of a format. Raises :class:`NoParquet` before anything is written."""
    if format == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise NoParquet(
                "expected pyarrow on the server for Parquet (the extra `parquet`), found none: "
                "install it there, or export as csv or jsonl"
            ) from None
        return write_parquet
    return {"csv": write_csv, "jsonl": write_jsonl}[format]


def write_csv(columns: Columns, chunks: Iterable[Chunk]) -> Iterator[bytes]:
    """CSV with a header row."""
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(columns)
    for chunk in chunks:
        writer.writerows(
            zip(*(_texts(chunk[name], columns[name]) for name in columns), strict=True)
        )
        yield _take(out)
    yield _take(out)  # the header of a table without rows


def write_jsonl(columns: Columns, chunks: Iterable[Chunk]) -> Iterator[bytes]:
    """JSON Lines: one object per row."""
    for chunk in chunks:
        lists = [_json_values(chunk[name], columns[name]) for name in columns]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True))
        yield "".join(
            json.dumps(row, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
            for row in rows
        ).encode(errors="replace")


def write_parquet(columns: Columns, chunks: Iterable[Chunk]) -> Iterator[bytes]:
    """Parquet with one row group per chunk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "int": pa.int64(),
        "float": pa.float64(),
        "text": pa.string(),
        "bool": pa.bool_(),
        "time": pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    out = _Sink()
    with pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for chunk in chunks:
            writer.write_table(pa.table({n: list(chunk[n]) for n in columns}, schema=schema))
            yield out.take()
    yield out.take()


class _Sink(io.RawIOBase):
    """A buffer that returns and drops the bytes written since the last call of :meth:`take`."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _take(out: io.StringIO) -> bytes:
    text = out.getvalue()
    out.seek(0)
    out.truncate()
    return text.encode(errors="replace")


def csv_text(value: Any) -> Any:
    """Escape text so that spreadsheets do not evaluate it as a formula.

    Text that begins like a formula is prefixed with an apostrophe. So is each part after a
    semicolon, a tab or a line break, which some programs read as separators of cells. Other values
    are returned unchanged. See https://owasp.org/www-community/attacks/CSV_Injection.
    """
    if not isinstance(value, str):
        return value
    value = _INNER_FORMULA.sub(r"\1'", value)
    return f"'{value}" if value.lstrip(' "').startswith(_FORMULA) else value


def _texts(values: Iterable[Any], kind: Kind) -> Iterable[Any]:
    if kind == "time":
        return (iso(value) for value in values)
    if kind == "text":
        return map(csv_text, values)
    return values  # csv writes None as an empty cell, and floats with all digits


def _json_values(values: Iterable[Any], kind: Kind) -> Iterable[Any]:
    if kind == "time":
        return (iso(value) if isinstance(value, datetime) else None for value in values)
    if kind == "float":
        return (v if v is None or math.isfinite(v) else str(v) for v in values)
    return values
