"""`tidegate logs summary` over logs made here."""

from pathlib import Path

import msgspec
import pytest

from tidegate.clients.logs.spread import Spread, spread
from tidegate.clients.logs.summary import Refusals, render, summarise


def finished(number: int, **fields: object) -> dict[str, object]:
    return {
        "time": f"2026-01-02T03:04:05.{number:06}Z",
        "level": "info",
        "process": "scheduler",
        "pid": 7,
        "event": "request_finished",
        "request_id": f"e-{number}",
        "reason": "length",
        "phase": "decoding",
        "text": "",
        "prompt_tokens": 10,
        "max_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 5,
        "queue_us": number,
        "prefill_us": 1000 * number,
        "handoff_us": 10 * number,
        "decode_us": 2000 * number,
        "total_us": 4000 * number,
        "ttft_us": 1500 * number,
        "pages_full_peak": 3,
        "pages_window_peak": 2,
        "bytes_moved": 100,
        "bytes_saved": 300,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "preemptions": 0,
    } | fields


def refused(needed: int, **fields: object) -> dict[str, object]:
    return {
        "time": "2026-01-02T03:04:05.000000Z",
        "level": "info",
        "process": "scheduler",
        "pid": 7,
        "event": "request_refused",
        "request_id": f"r-{needed}",
        "status": 400,
        "code": "kv_pool_exceeded",
        "text": "too long",
        "pool": "full",
        "needed": needed,
        "limit": 64,
        "role": "decode",
        "worker": "decode-0",
    } | fields


def write(path: Path, *lines: dict[str, object] | bytes) -> Path:
    encoded = (
        line if isinstance(line, bytes) else msgspec.json.encode(line) + b"\n" for line in lines
    )
    path.write_bytes(b"".join(encoded))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_reasons_tokens_and_bytes_add_up(log: Path) -> None:
    summary = summarise(
        write(log, finished(1), finished(2, reason="end_token"), finished(3, bytes_moved=50))
    )
    assert summary.finished == 3
    assert summary.reasons == {"length": 2, "end_token": 1}
    assert (summary.prompt_tokens, summary.output_tokens) == (30, 15)
    assert (summary.bytes_moved, summary.bytes_saved) == (250, 900)


def test_percentiles_count_only_requests_that_reached_the_phase(log: Path) -> None:
    lines = [finished(number) for number in range(1, 101)]
    lines.append(finished(101, reason="timeout", prefill_us=None, ttft_us=None))
    summary = summarise(write(log, *lines))
    assert summary.times["prefill"] == Spread(100, 50_000, 95_000, 100_000)
    assert summary.times["ttft"].count == 100
    assert summary.times["queue"].count == 101


def test_a_phase_that_nobody_reached_has_no_times(log: Path) -> None:
    summary = summarise(write(log, finished(1, handoff_us=None)))
    assert "handoff" not in summary.times
    assert "hand-off  " not in render(summary)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([7], Spread(1, 7, 7, 7)),
        ([3, 1, 2], Spread(3, 2, 3, 3)),
        (range(1, 21), Spread(20, 10, 19, 20)),
    ],
)
def test_percentiles_are_the_nearest_rank(values: list[int], expected: Spread | None) -> None:
    assert spread(values) == expected


def test_refusals_are_grouped_by_pool_and_place(log: Path) -> None:
    summary = summarise(
        write(
            log,
            refused(100),
            refused(70),
            refused(33, pool="window", limit=32, role="prefill", worker="prefill-0"),
            refused(0, status=429, code="queue_full", pool="", limit=0, role="", worker=""),
        )
    )
    assert summary.refused == 4
    assert summary.refusals[0] == Refusals(
        400, "kv_pool_exceeded", "full", "decode", "decode-0", 64, 70, 100, 2
    )
    text = render(summary)
    assert "70 to 100" in text
    assert "64 pages" in text
    assert "prefill prefill-0" in text
    assert "queue_full" in text


def test_cut_and_foreign_lines_are_counted_and_told(log: Path) -> None:
    cut = msgspec.json.encode(finished(2))[:50] + b"\n"
    strange = msgspec.json.encode(finished(3, total_us="long")) + b"\n"
    summary = summarise(
        write(
            log, finished(1), b"GET / HTTP/1.1\n", cut, b"\xff\xfe\n", b"\n", strange, b"{}\n"
        )
    )
    assert summary.finished == 1
    assert (summary.lines.read, summary.lines.foreign) == (7, 6)
    assert "6 cut or not of tidegate" in render(summary)


def test_other_events_are_no_foreign_lines(log: Path) -> None:
    other: dict[str, object] = {"time": "2026-01-02T03:04:05Z", "event": "launch", "rows": 3}
    summary = summarise(write(log, other))
    assert (summary.lines.read, summary.lines.foreign) == (1, 0)


def test_an_empty_log_has_a_summary(log: Path) -> None:
    assert "requests: 0 finished, 0 refused" in render(summarise(write(log)))


def test_the_summary_reads_like_a_table(log: Path) -> None:
    text = render(summarise(write(log, finished(1), finished(2), refused(100))))
    assert text == (
        "3 lines read\n"
        "\n"
        "requests: 2 finished, 1 refused\n"
        "  length  2\n"
        "\n"
        "times             p50     p95     max  requests\n"
        "  queue          1 us    2 us    2 us         2\n"
        "  prefill      1.0 ms  2.0 ms  2.0 ms         2\n"
        "  hand-off      10 us   20 us   20 us         2\n"
        "  decode       2.0 ms  4.0 ms  4.0 ms         2\n"
        "  first token  1.5 ms  3.0 ms  3.0 ms         2\n"
        "  in all       4.0 ms  8.0 ms  8.0 ms         2\n"
        "\n"
        "tokens: 20 prompt (0 cached), 10 output\n"
        "hand-offs: 200 B moved, 600 B saved by moving windows only (75 % of all)\n"
        "\n"
        "refusals            count  status  pool  needed  limit     at\n"
        "  kv_pool_exceeded      1  400     full  100     64 pages  decode decode-0"
    )


def test_service_is_told_for_each_tenant(log: Path) -> None:
    summary = summarise(
        write(
            log,
            *(
                finished(number, tenant="busy", charged_tokens=30, queue_us=1000 * number)
                for number in range(1, 98)
            ),
            finished(98, tenant="busy", charged_tokens=30, queue_us=98_000, reason="timeout"),
            finished(99, tenant="busy", charged_tokens=30, queue_us=99_000, reason="error"),
            finished(100, tenant="busy", charged_tokens=30, queue_us=10**5, reason="cancelled"),
            finished(1, tenant="", charged_tokens=1000, cached_tokens=4, queue_us=7_000),
            refused(1, status=429, code="tenant_queue_full", tenant="busy"),
            refused(2, tenant="never"),
        )
    )
    assert [one.tenant for one in summary.tenants] == ["busy", "", "never"]
    busy, nameless, never = summary.tenants
    assert (busy.finished, busy.refused, busy.charged_tokens) == (100, 1, 3000)
    assert (busy.prompt_tokens, busy.output_tokens) == (1000, 500)
    assert busy.reasons == {"length": 97, "timeout": 1, "error": 1, "cancelled": 1}
    assert busy.queue == Spread(100, 50_000, 95_000, 100_000)
    assert (nameless.finished, nameless.cached_tokens) == (1, 4)
    assert (never.finished, never.refused, never.queue) == (0, 1, None)
    lines = render(summary).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("  busy")]
    assert " ".join(row) == "busy 100 1 2 1 1,000 500 3,000 75.0 % 50.0 ms 95.0 ms"
    (row,) = [line.split() for line in lines if line.startswith("  (no name)")]
    assert row[-7:] == ["1,000", "25.0", "%", "7.0", "ms", "7.0", "ms"]


def test_a_log_without_tenants_tells_nothing_of_them(log: Path) -> None:
    summary = summarise(write(log, finished(1), finished(2)))
    assert [one.finished for one in summary.tenants] == [2]
    assert "tenants" not in render(summary)


def test_of_many_tenants_those_that_were_given_most_are_shown(log: Path) -> None:
    lines = (finished(n, tenant=f"t{n:02}", charged_tokens=n) for n in range(1, 31))
    summary = summarise(write(log, *lines))
    text = render(summary)
    assert len(summary.tenants) == 30
    assert "  t30" in text and "  t11" in text and "  t10" not in text
    assert f"10 others, charged {sum(range(1, 11))} together" in text
