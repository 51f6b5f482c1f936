"""Traces of requests: when each came, how long its prompt and its output were.

Two public forms are read, by the file's ending. `.csv` is that of the Azure LLM inference
traces: TIMESTAMP, ContextTokens, GeneratedTokens. `.jsonl` is that of the Mooncake traces:
timestamp in milliseconds, input_length, output_length, and hash_ids, one for each 512 tokens
of the prompt: the same ids at the beginning are the same tokens.

Mooncake's times are rounded to ticks of about three seconds. As all requests of a tick at once
would be a burst that nobody sent, they are spread evenly up to the next tick.
"""

import csv
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512  # Of a Mooncake hash id.
FRACTION_DIGITS = 6  # Of a second, as `datetime` reads them; Azure's have one more.


class TraceRequest(msgspec.Struct, frozen=True):
    """`blocks` names the prompt's stretches of 512 tokens; it is empty if they are unknown."""

    at_us: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class TraceError(ValueError):
    """A file that is no trace; the text names it, and the line."""


class _MooncakeLine(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, count: int | None, first: int = 0) -> list[TraceRequest]:
    """`count` requests (None: all) from the number `first` on, the first of them at time 0.

    Raises `TraceError` for another form, and if the file has no request there.
    """
    with path.open(encoding="utf-8") as lines:
        read = _azure(path, lines) if path.suffix == ".csv" else _mooncake(path, lines)
        requests = sorted(read, key=lambda request: request.at_us)
    if path.suffix != ".csv":
        requests = spread_ticks(requests)
    chosen = requests[first : None if count is None else first + count]
    if not chosen:
        raise TraceError(f"{path}: it has {len(requests)} requests, and none from {first} on")
    begin_us = chosen[0].at_us
    return [
        msgspec.structs.replace(request, at_us=request.at_us - begin_us) for request in chosen
    ]


def unit_hashes(request: TraceRequest, unit_tokens: int) -> tuple[bytes, ...]:
    """One hash for each full unit of the prompt, as a prefix cache is asked with.

    `unit_tokens` divides the blocks of the trace.
    """
    if not request.blocks:
        return ()
    per_block, rest = divmod(BLOCK_TOKENS, unit_tokens)
    if rest:
        raise ValueError(f"units of {unit_tokens} tokens do not divide {BLOCK_TOKENS}")
    return tuple(
        request.blocks[unit // per_block].to_bytes(8, "little")
        + (unit % per_block).to_bytes(2, "little")
        for unit in range(request.prompt_tokens // unit_tokens)
    )


def spread_ticks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Requests with the same time, spread evenly up to the next time that occurs.

    Those of the last time follow one another as those before them did.
    """
    times = sorted({request.at_us for request in requests})
    gaps = [after - before for before, after in pairwise(times)]
    gap_of = dict(zip(times, gaps, strict=False))
    if times:
        gap_of[times[-1]] = gaps[-1] if gaps else 0
    count_of = dict.fromkeys(times, 0)
    for request in requests:
        count_of[request.at_us] += 1
    seen = dict.fromkeys(times, 0)
    spread: list[TraceRequest] = []
    for request in requests:
        tick = request.at_us
        at_us = tick + gap_of[tick] * seen[tick] // count_of[tick]
        seen[tick] += 1
        spread.append(msgspec.structs.replace(request, at_us=at_us))
    return spread


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            yield TraceRequest(
                _time_us(row["TIMESTAMP"]),
                int(row["ContextTokens"]),
                int(row["GeneratedTokens"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{path}, line {number}: TIMESTAMP, ContextTokens and GeneratedTokens were "
                f"expected: {error}"
            ) from None


def _time_us(stamp: str) -> int:
    whole, _, fraction = stamp.partition(".")
    time = datetime.fromisoformat(f"{whole}.{fraction[:FRACTION_DIGITS] or '0':0<6}+00:00")
    return round(time.timestamp() * 1e6)


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, text in enumerate(lines, 1):
        try:
            line = decode(text)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        yield TraceRequest(
            line.timestamp * 1000, line.input_length, line.output_length, line.hash_ids
        )
