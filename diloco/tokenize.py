"""``python -m diloco.tokenize SOURCE DESTINATION``: write text as token shards.

SOURCE is ``stdlib``, files (a file, a folder or a glob, on this machine or in a bucket) with text,
JSON lines or Parquet, or the name of a data set on the Hub. DESTINATION is a folder or a bucket
prefix. A command that was interrupted, started again with the same arguments, continues. Replicas
stream the shards (docs/data.md).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256

from diloco.command_line import add_common_options
from diloco.data.shard_index import BYTES, INDEX, BadIndex, ShardIndex
from diloco.data.shard_reader import patient
from diloco.data.shard_writer import WrittenPart, part_key, read_part, shards_of
from diloco.error_lines import print_error
from diloco.protocol.settings import SettingsError
from diloco.store.base import MissingKey, Store, StoreError, exists
from diloco.store.open import open_store
from diloco.store.uris import check_rendezvous
from diloco.workloads.text import HELD_OUT
from diloco.workloads.tokenizing import (
    FORMATS,
    Encoder,
    Part,
    Source,
    find_parts,
    load_encoder,
    tokenize_part,
)

SPEC = "parts/spec.json"
_SPEC_BYTES = 1 << 20
SHARD_TOKENS = 1 << 22
_QUEUED_PER_WORKER = 2


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions:
    """How to write the shards. ``held_out`` is the share of the text that is never trained on."""

    tokenizer: str = BYTES
    shard_tokens: int = SHARD_TOKENS
    held_out: float = HELD_OUT
    workers: int = 1

    def __post_init__(self) -> None:
        if not 1024 <= self.shard_tokens <= 1 << 26:
            raise SettingsError(
                "shard_tokens", f"expected 1024 to {1 << 26}, found {self.shard_tokens}"
            )
        if not 0 <= self.held_out < 1:
            raise SettingsError(
                "held_out", f"expected a share from 0 to below 1, found {self.held_out}"
            )
        if not 1 <= self.workers <= 256:
            raise SettingsError("workers", f"expected 1 to 256, found {self.workers}")


def tokenize(
    source: Source,
    destination: str,
    options: TokenizeOptions | None = None,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> ShardIndex:
    """Write token shards of ``source`` to ``destination`` and return their index.

    Parts that an earlier call with the same arguments has written are not written again. Raises
    :class:`SettingsError` for text or a tokenizer that cannot be read, :class:`FileExistsError` if
    the destination has other or complete shards, and a :class:`~diloco.store.base.StoreError`.
    """
    options = options or TokenizeOptions()
    store = patient(open_store(destination))
    if exists(store, INDEX):
        raise FileExistsError(
            f"expected no token shards at {destination}, found {INDEX}: choose another destination"
        )
    encoder = load_encoder(options.tokenizer)
    parts = find_parts(source)
    _check_spec(store, _spec(source, options, encoder, parts))
    written = [read_part(store, number) for number in range(len(parts))]
    missing = [number for number, part in enumerate(written) if part is None]
    if len(missing) < len(parts):
        report(f"{len(parts) - len(missing)} of {len(parts)} parts are written")
    jobs = [_Job(source, parts[number], number, destination, options) for number in missing]
    for job, part in _run(jobs, options.workers):
        written[job.number] = part
        done = sum(part is not None for part in written)
        tokens = sum(shard.tokens for part in written if part for shard in part.train)
        report(f"{done} of {len(parts)} parts, {tokens:,} tokens")
    index = ShardIndex(
        tokenizer=options.tokenizer,
        tokenizer_digest=encoder.digest,
        vocabulary=encoder.vocabulary,
        end=encoder.end,
        train=shards_of(written, "train"),
        held_out=shards_of(written, "held_out"),
    )
    if not index.train or (options.held_out and not index.held_out):
        empty, share = ("train on", "smaller") if not index.train else ("hold out", "larger")
        tokens = sum(shard.tokens for shard in (*index.train, *index.held_out))
        raise SettingsError(
            "held_out",
            f"expected text to {empty}, found none in {tokens:,} tokens with the share "
            f"{options.held_out:g}: enter a {share} --held-out and another destination, or more "
            "text",
        )
    store.put(INDEX, index.to_bytes())
    store.delete([SPEC, *(part_key(number) for number in range(len(parts)))])
    return index


def _spec(source: Source, options: TokenizeOptions, encoder: Encoder, parts: list[Part]) -> bytes:
    """Return what the shards depend on; parts of another specification are refused."""
    listed = sha256(json.dumps([asdict(part) for part in parts]).encode()).hexdigest()
    body = {
        "source": asdict(source),
        "parts": listed,
        "tokenizer": encoder.digest,
        "shard_tokens": options.shard_tokens,
        "held_out": options.held_out,
    }
    return json.dumps(body, sort_keys=True).encode()


def _check_spec(store: Store, spec: bytes) -> None:
    try:
        found = store.get(SPEC, limit=_SPEC_BYTES)
    except MissingKey:
        store.put(SPEC, spec)
        return
    if found != spec:
        raise FileExistsError(
            f"expected the parts of this command at {store.uri}, found those of another source, "
            f"tokenizer, shard size or held-out share ({SPEC}): choose another destination"
        )


@dataclass(frozen=True)
class _Job:
    source: Source
    part: Part
    number: int
    destination: str
    options: TokenizeOptions


_encoder = lru_cache(maxsize=1)(load_encoder)


def _write(job: _Job) -> WrittenPart:
    return tokenize_part(
        job.source,
        job.part,
        job.number,
        _encoder(job.options.tokenizer),
        patient(open_store(job.destination)),
        shard_tokens=job.options.shard_tokens,
        held_out=job.options.held_out,
    )


def _run(jobs: Sequence[_Job], workers: int) -> Iterator[tuple[_Job, WrittenPart]]:
    """Yield each job when its part is written, in any order."""
    if workers == 1 or len(jobs) < 2:
        yield from ((job, _write(job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        rest = iter(jobs)
        running: dict[Future[WrittenPart], _Job] = {}
        try:
            while True:
                for job in rest:
                    running[pool.submit(_write, job)] = job
                    if len(running) >= workers * _QUEUED_PER_WORKER:
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m diloco.tokenize", description=__doc__)
    parser.add_argument(
        "source", help="'stdlib', files (folder, glob or bucket), or a Hub data set"
    )
    parser.add_argument("destination", help="folder or bucket prefix of the shards")
    parser.add_argument(
        "--tokenizer", default=BYTES, help="'bytes', a directory, or a name on the Hub"
    )
    parser.add_argument("--format", default="auto", choices=FORMATS, help="format of the source")
    parser.add_argument("--text-column", default="text", help="column with the text")
    parser.add_argument("--data-config", default="", help="subset of a data set on the Hub")
    parser.add_argument("--data-split", default="train", help="split of a data set on the Hub")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens of a shard")
    parser.add_argument(
        "--held-out", type=float, default=HELD_OUT, help="share of the text for evaluations"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    add_common_options(parser)
    arguments = parser.parse_args(argv)
    source = Source(
        data=arguments.source,
        format=arguments.format,
        column=arguments.text_column,
        config=arguments.data_config,
        split=arguments.data_split,
    )
    try:
        check_rendezvous(arguments.destination, relative=True)
        options = TokenizeOptions(
            tokenizer=arguments.tokenizer,
            shard_tokens=arguments.shard_tokens,
            held_out=arguments.held_out,
            workers=arguments.workers,
        )
        index = tokenize(
            source,
            arguments.destination,
            options,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except (SettingsError, StoreError, BadIndex, BrokenExecutor, OSError, ValueError) as error:
        print_error(error, uri=arguments.destination, verbose=arguments.verbose)
        return 1
    held_out = sum(shard.tokens for shard in index.held_out)
    print(
        f"{index.tokens:,} tokens in {len(index.train):,} shards, {index.documents:,} documents, "
        f"and {held_out:,} held-out tokens at {arguments.destination}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
