"""`tidegate logs summary`: what became of all requests in a log."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tidegate.clients.logs.lines import (
    UNREADABLE,
    LineCount,
    count_words,
    decode_event,
    read_lines,
)
from tidegate.clients.logs.spread import Spread, spread
from tidegate.clients.logs.tenants import Served, TenantService, render_tenants, service_of
from tidegate.clients.logs.words import bytes_text, columns, count_text, time_text
from tidegate.ipc.log_events import LogEvent


class FinishedLine(msgspec.Struct, tag_field="event", tag=LogEvent.REQUEST_FINISHED.value):
    """The summary line of one request. A phase that it never reached has no time."""

    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    total_us: int
    bytes_moved: int
    bytes_saved: int
    cached_tokens: int = 0
    charged_tokens: int = 0
    tenant: str = ""
    queue_us: int | None = None
    prefill_us: int | None = None
    handoff_us: int | None = None
    decode_us: int | None = None
    ttft_us: int | None = None


class RefusedLine(msgspec.Struct, tag_field="event", tag=LogEvent.REQUEST_REFUSED.value):
    """A request that entered no queue."""

    request_id: str
    status: int
    code: str
    pool: str = ""
    needed: int = 0
    limit: int = 0
    role: str = ""
    worker: str = ""
    tenant: str = ""


class Refusals(msgspec.Struct):
    """Refusals for one cause at one limit. Counts are pages, or tokens of the context."""

    status: int
    code: str
    pool: str
    role: str
    worker: str
    limit: int
    needed_min: int
    needed_max: int
    count: int


class Summary(msgspec.Struct):
    """`times` has an entry for each phase that some request reached."""

    lines: LineCount
    finished: int
    reasons: dict[str, int]  # The most frequent first.
    times: dict[str, Spread]
    refused: int
    refusals: list[Refusals]  # The most frequent first.
    tenants: list[TenantService]  # Who was given most first.
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    bytes_moved: int
    bytes_saved: int


PHASE_WORDS = {
    "queue": "queue",
    "prefill": "prefill",
    "handoff": "hand-off",
    "decode": "decode",
    "ttft": "first token",
    "total": "in all",
}


_decode_wanted = msgspec.json.Decoder(FinishedLine | RefusedLine).decode
_WANTED = (LogEvent.REQUEST_FINISHED.value, LogEvent.REQUEST_REFUSED.value)


def summarise(path: Path) -> Summary:
    """Read a log once. Raises `LogFileError`."""
    counted = LineCount()
    finished: list[FinishedLine] = []
    refused: list[RefusedLine] = []
    for line in read_lines(path, counted):
        try:
            if decode_event(line).event not in _WANTED:
                continue
            match _decode_wanted(line):
                case FinishedLine() as one:
                    finished.append(one)
                case RefusedLine() as other:
                    refused.append(other)
        except UNREADABLE:
            counted.foreign += 1
    return Summary(
        lines=counted,
        finished=len(finished),
        reasons=dict(Counter(one.reason for one in finished).most_common()),
        times=_spreads(finished),
        refused=len(refused),
        refusals=_group(refused),
        tenants=service_of(map(_served, finished), (one.tenant for one in refused)),
        prompt_tokens=sum(one.prompt_tokens for one in finished),
        cached_tokens=sum(one.cached_tokens for one in finished),
        output_tokens=sum(one.output_tokens for one in finished),
        bytes_moved=sum(one.bytes_moved for one in finished),
        bytes_saved=sum(one.bytes_saved for one in finished),
    )


def render(summary: Summary) -> str:
    """The summary for a terminal."""
    parts = [
        count_words(summary.lines),
        _render_counts(summary),
        _render_times(summary.times),
        _render_amounts(summary),
        render_tenants(summary.tenants),
        _render_refusals(summary.refusals),
    ]
    return "\n\n".join(part for part in parts if part)


def _served(line: FinishedLine) -> Served:
    return Served(
        line.tenant,
        line.reason,
        line.prompt_tokens,
        line.cached_tokens,
        line.output_tokens,
        line.charged_tokens,
        line.queue_us,
    )


def _spreads(finished: Sequence[FinishedLine]) -> dict[str, Spread]:
    columns_us: dict[str, list[int | None]] = {
        "queue": [one.queue_us for one in finished],
        "prefill": [one.prefill_us for one in finished],
        "handoff": [one.handoff_us for one in finished],
        "decode": [one.decode_us for one in finished],
        "ttft": [one.ttft_us for one in finished],
        "total": [one.total_us for one in finished],
    }
    found = {
        phase: spread(value for value in values if value is not None)
        for phase, values in columns_us.items()
    }
    return {phase: one for phase, one in found.items() if one is not None}


def _group(refused: Iterable[RefusedLine]) -> list[Refusals]:
    groups: dict[tuple[int, str, str, str, str, int], Refusals] = {}
    for one in refused:
        key = (one.status, one.code, one.pool, one.role, one.worker, one.limit)
        group = groups.setdefault(key, Refusals(*key, one.needed, one.needed, count=0))
        group.needed_min = min(group.needed_min, one.needed)
        group.needed_max = max(group.needed_max, one.needed)
        group.count += 1
    return sorted(groups.values(), key=lambda group: -group.count)


def _render_counts(summary: Summary) -> str:
    lines = [f"requests: {summary.finished:,} finished, {summary.refused:,} refused"]
    rows = [(f"  {reason}", f"{count:,}") for reason, count in summary.reasons.items()]
    return "\n".join([*lines, *(columns(rows, right=(1,)) if rows else ())])


def _render_times(times: Mapping[str, Spread]) -> str:
    if not times:
        return ""
    rows = [("times", "p50", "p95", "max", "requests")]
    for phase, one in times.items():
        spans = (time_text(one.p50_us), time_text(one.p95_us), time_text(one.max_us))
        rows.append((f"  {PHASE_WORDS[phase]}", *spans, f"{one.count:,}"))
    return "\n".join(columns(rows, right=(1, 2, 3, 4)))


def _render_amounts(summary: Summary) -> str:
    if not summary.finished:
        return ""
    cached = f"{summary.cached_tokens:,} cached"
    if summary.cached_tokens:
        cached += f", {100 * summary.cached_tokens / summary.prompt_tokens:.0f} %"
    whole = summary.bytes_moved + summary.bytes_saved
    share = f" ({100 * summary.bytes_saved / whole:.0f} % of all)" if whole else ""
    return (
        f"tokens: {summary.prompt_tokens:,} prompt ({cached}), "
        f"{summary.output_tokens:,} output\n"
        f"hand-offs: {bytes_text(summary.bytes_moved)} moved, "
        f"{bytes_text(summary.bytes_saved)} saved by moving windows only{share}"
    )


def _render_refusals(refusals: Sequence[Refusals]) -> str:
    if not refusals:
        return ""
    rows = [("refusals", "count", "status", "pool", "needed", "limit", "at")]
    for one in refusals:
        unit = "token" if one.pool == "context" else "page"
        needed, limit = str(one.needed_min), count_text(one.limit, unit)
        if one.needed_max != one.needed_min:
            needed = f"{one.needed_min:,} to {one.needed_max:,}"
        if not one.pool:
            needed, limit = "-", "-"
        where = " ".join(part for part in (one.role, one.worker) if part) or "-"
        rows.append(
            (
                f"  {one.code}",
                f"{one.count:,}",
                str(one.status),
                one.pool or "-",
                needed,
                limit,
                where,
            )
        )
    return "\n".join(columns(rows, right=(1,)))
