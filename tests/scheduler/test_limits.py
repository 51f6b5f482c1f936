"""Rows that sit out: not far beyond a possible stop string, and for slow readers."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    STALL_US,
    B,
    CoreBench,
    D,
    P,
    emitted,
    finished,
    joined,
    lost,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, Grow, Limit, RequestId, Role, Row, WaitKind
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import Command, SendPlan, StartRow
from tidegate.scheduler.events import ClientGone, ClientId, ReaderChanged
from tidegate.scheduler.limits import STOP_TEXT_AHEAD_TOKENS
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.waits import Explainer

CLIENT = ClientId("client")
SETTINGS = CoreSettings(
    chunk_tokens=None,
    ahead_tokens=Tokens(64),
    stall_timeout_us=STALL_US,
    prefix_cache=False,
)


def both(page_count: int = 60) -> CoreBench:
    return CoreBench(joined(B, Role.BOTH, (page_count,), FULL_ONLY), settings=SETTINGS)


def behind(is_behind: bool, client: ClientId = CLIENT) -> ReaderChanged:
    return ReaderChanged(client, is_behind)


def limits(commands: list[Command]) -> list[tuple[int, int]]:
    plans = [command for command in commands if isinstance(command, SendPlan)]
    operations = [operation for plan in plans for operation in plan.operations]
    return [(op.row, op.limit) for op in operations if isinstance(op, Limit)]


def test_a_row_with_stop_text_runs_few_tokens_ahead_although_its_pages_reach_further() -> None:
    bench = both()
    bench.turn(submitted("r", 8, 100, has_stop_text=True))
    commands = bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}))
    assert limits(commands) == [(0, 8 + STOP_TEXT_AHEAD_TOKENS)]
    seat = bench.worker(B).seats[Row(0)]
    assert seat.holding.covered == 72
    # It is told to go on when half of them are left, and not before.
    assert bench.turn(report(B, 2, tokens={0: 7})) == [emitted(1)]
    commands = bench.turn(report(B, 2, tokens={0: 1}))
    assert limits(commands) == [(0, 16 + STOP_TEXT_AHEAD_TOKENS)]


def test_the_limit_of_a_row_with_stop_text_ends_with_its_request() -> None:
    bench = both()
    bench.turn(submitted("r", 8, 20, has_stop_text=True))
    bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}))
    commands = bench.turn(report(B, 2, tokens={0: 8}))
    assert limits(commands) == [(0, 27)]
    last = report(B, bench.worker(B).seq, tokens={0: 11}, ended={0: EndReason.LENGTH})
    assert finished(bench.turn(last))["r"].usage.output_tokens == 20


def test_a_limit_follows_its_start_in_the_plan_that_begins_decode() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY),
        joined(D, Role.DECODE, (50,), FULL_ONLY),
        settings=SETTINGS,
    )
    bench.turn(submitted("r", 8, 100, has_stop_text=True))
    bench.turn(
        report(P, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.LENGTH}),
    )
    ticket = bench.core.fleet.requests[RequestId("r")].ticket
    assert ticket is not None
    commands = bench.turn(report(D, bench.worker(D).seq, fetched={ticket: ""}))
    start, limit = plan_of(commands, D).operations
    assert isinstance(start, StartRow) and start.limit == 107
    assert limit == Limit(Row(0), 8 + STOP_TEXT_AHEAD_TOKENS)


def test_rows_of_a_slow_reader_sit_out_until_it_has_caught_up() -> None:
    bench = both()
    bench.decode_whole("r", 8, 100)
    bench.turn(submitted("other", 8, 100, client="somebody"))
    bench.turn(report(B, bench.worker(B).seq, chunks={1: 8}, tokens={1: 1}))
    assert limits(bench.turn(behind(True))) == [(0, 0)]
    assert bench.turn(behind(True)) == []
    assert why(bench, "r") is WaitKind.READER and why(bench, "other") is WaitKind.ANSWER
    # What was under way comes, and is delivered.
    assert emitted(1, 1) in bench.turn(report(B, bench.worker(B).seq, tokens={0: 2, 1: 2}))
    assert limits(bench.turn(behind(False))) == [(0, 107)]
    assert why(bench, "r") is WaitKind.ANSWER
    assert waits(bench) == [("reader", "r"), ("goes on", "r")]


def test_a_request_that_comes_from_a_slow_reader_sits_out_after_its_prompt() -> None:
    bench = both()
    bench.turn(behind(True))
    bench.turn(submitted("r", 8, 100))
    commands = bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}))
    assert limits(commands) == [(0, 0)]
    assert limits(bench.turn(behind(False))) == [(0, 107)]


def test_a_slow_reader_keeps_no_row_from_pages_and_takes_none_meanwhile() -> None:
    bench = both(6)
    bench.decode_whole("slow", 4, 20)
    bench.turn(submitted("b", 4, 20, client="somebody"))
    bench.turn(report(B, bench.worker(B).seq, chunks={1: 4}, tokens={1: 1}))
    bench.turn(behind(True))
    seat = bench.worker(B).seats[Row(0)]
    bench.turn(report(B, bench.worker(B).seq, tokens={0: seat.holding.covered - 4}))
    assert seat.is_starving
    for _ in range(3):
        assert [c for c in bench.turn() if isinstance(c, SendPlan)] == []
    commands = bench.turn(behind(False))
    assert any(isinstance(op, Grow | Limit) for op in plan_of(commands, B).operations)


def test_a_worker_whose_rows_all_sit_out_owes_nothing() -> None:
    bench = both()
    bench.decode_whole("r", 8, 100)
    bench.turn(behind(True))
    bench.turn(report(B, bench.worker(B).seq))
    bench.now_us += STALL_US - 1
    bench.turn()
    assert not bench.worker(B).is_suspect and bench.phase("r") is Phase.DECODING
    # From when it goes on the worker has its whole time again.
    bench.turn(behind(False))
    bench.turn(report(B, bench.worker(B).seq))
    bench.now_us += STALL_US - 1
    bench.turn()
    assert not bench.worker(B).is_suspect
    bench.now_us += 1
    bench.turn()
    assert bench.worker(B).is_suspect


def test_a_reader_that_never_catches_up_ends_its_requests_after_a_while() -> None:
    bench = both()
    bench.decode_whole("r", 8, 100)
    bench.now_us += 5
    bench.turn(behind(True))
    bench.turn(report(B, bench.worker(B).seq))
    bench.now_us += STALL_US
    answer = finished(bench.turn())["r"]
    assert (answer.reason, answer.status) == (EndReason.TIMEOUT, 503)
    assert answer.text == "its client did not catch up with reading for 10 s, the limit"
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.free(B) == [60] and bench.core.is_idle


@pytest.mark.parametrize("goes", [True, False])
def test_a_held_request_that_begins_anew_sits_out_again(goes: bool) -> None:
    other = "b2"
    bench = CoreBench(
        joined(B, Role.BOTH, (60,), FULL_ONLY),
        joined(type(B)(other), Role.BOTH, (30,), FULL_ONLY),
        settings=SETTINGS,
    )
    bench.decode_whole("r", 8, 100)
    bench.turn(behind(True))
    bench.turn(lost(B))
    if goes:
        bench.turn(ClientGone(CLIENT, "it went away"))
        assert not bench.core.fleet.behind and not bench.core.fleet.requests
        return
    (survivor,) = bench.core.fleet.workers.values()
    commands = bench.turn(
        report(survivor.worker_id, survivor.seq, chunks={0: 9}, tokens={0: 1})
    )
    assert limits(commands) == [(0, 0)]


def why(bench: CoreBench, name: str) -> WaitKind:
    fleet = bench.core.fleet
    return Explainer(fleet).explain(fleet.requests[RequestId(name)]).kind


def waits(bench: CoreBench) -> list[tuple[object, str | None]]:
    return [
        (
            record.fields["reason"] if record.event is LogEvent.REQUEST_WAITS else "goes on",
            record.request_id,
        )
        for record in bench.records
        if record.event in (LogEvent.REQUEST_WAITS, LogEvent.REQUEST_GOES_ON)
    ]
