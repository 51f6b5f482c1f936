"""What a request is said to wait for, in every phase: exactly what the plan has found."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    D,
    P,
    cancelled,
    joined,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    EndReason,
    PageHolder,
    Phase,
    RequestId,
    Role,
    Waiting,
    WaitKind,
)
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import Command, FieldValue
from tidegate.scheduler.events import Event
from tidegate.scheduler.queues import WaitingQueue
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.waits import HOLDER_COUNT_MAX, Explainer


def why(bench: CoreBench, name: str) -> Waiting:
    return Explainer(bench.core.fleet).explain(bench.core.fleet.requests[RequestId(name)])


def holders(**page_counts: int) -> tuple[PageHolder, ...]:
    return tuple(PageHolder(RequestId(name), count) for name, count in page_counts.items())


def waits(bench: CoreBench, name: str) -> list[dict[str, FieldValue]]:
    return [
        record.fields
        for record in bench.records
        if record.event is LogEvent.REQUEST_WAITS and record.request_id == name
    ]


# --- The queue ---


def test_the_head_waits_for_the_window_pool_that_two_others_hold() -> None:
    settings = CoreSettings(chunk_tokens=Tokens(4), ahead_tokens=Tokens(4))
    bench = CoreBench(joined(B, Role.BOTH, (50, 7)), settings=settings)
    bench.turn(submitted("b", 8, 1), submitted("a", 20, 5))
    bench.turn(submitted("c", 20, 5))
    # Of a window of 6 and pages of 4, three pages are promised: "b" is too short for that.
    found = Waiting(
        RequestId("c"),
        Phase.WAITING,
        WaitKind.PAGES,
        "c waits for 1 more page of the window pool of both worker b: "
        "it begins when 3 are available, and 2 are; a has 3, b has 2",
        role=Role.BOTH,
        worker=B,
        pool="window",
        pages_short=1,
        pages_needed=3,
        pages_available=2,
        holders=holders(a=3, b=2),
    )
    assert why(bench, "c") == found
    assert waits(bench, "c") == [
        {
            "phase": "waiting",
            "reason": "pages",
            "role": "both",
            "worker": "b",
            "pool": "window",
            "pages_short": 1,
            "pages_needed": 3,
            "pages_available": 2,
            "pages_draining": 0,
            "pages_cached": 0,
            "holders": {"a": 3, "b": 2},
            "holders_left_out": 0,
        }
    ]


def test_pages_that_drain_are_waited_for_when_they_are_enough() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (10,), FULL_ONLY))
    bench.turn(submitted("a", 20, 4), submitted("b", 4, 4))
    bench.turn(submitted("c", 24, 4))
    # Seven pages for 25 positions, and two for the rows that may grow: two are there.
    assert (why(bench, "c").kind, why(bench, "c").pages_short) == (WaitKind.PAGES, 7)
    bench.turn(cancelled("b"))
    found = why(bench, "c")
    assert (found.kind, found.pages_needed, found.pages_available) == (WaitKind.PAGES, 8, 2)
    assert (found.pages_draining, found.holders) == (2, holders(a=6))
    assert found.text.endswith("when 8 are available, and 2 are; a has 6; 2 are draining")
    bench.turn(cancelled("a"))
    found = why(bench, "c")
    assert (found.kind, found.pages_short, found.pages_draining) == (WaitKind.DRAINING, 5, 8)
    assert found.holders == ()
    assert found.text == (
        "c waits for 5 more pages of the full pool of both worker b: "
        "8 are draining, and free when it has answered"
    )
    assert [fields["reason"] for fields in waits(bench, "c")] == ["pages", "draining"]


def test_of_many_holders_the_largest_are_named_and_the_others_counted() -> None:
    count = HOLDER_COUNT_MAX + 3
    bench = CoreBench(joined(B, Role.BOTH, (100,), FULL_ONLY, rows=50))
    bench.turn(*(submitted(f"r{index:02}", 4 * index + 1, 1) for index in range(count)))
    bench.turn(submitted("last", 300, 1))
    found = why(bench, "last")
    largest = reversed(range(3, count))
    assert found.holders == tuple(
        PageHolder(RequestId(f"r{index:02}"), index + 1) for index in largest
    )
    assert found.holders_left_out == 3
    assert found.text.endswith(", r03 has 4, and 3 others fewer")
    (fields,) = waits(bench, "last")
    assert fields["holders"] == {h.request_id: h.page_count for h in found.holders}
    assert fields["holders_left_out"] == 3


def test_a_row_is_waited_for_when_all_are_taken() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=2))
    bench.turn(submitted("a", 4, 4), submitted("b", 4, 4))
    bench.turn(submitted("c", 4, 4))
    text = "c waits for a row of both worker b: all 2 are taken"
    found = Waiting(RequestId("c"), Phase.WAITING, WaitKind.ROW, text, role=Role.BOTH, worker=B)
    assert why(bench, "c") == found
    bench.turn(cancelled("a"))
    assert why(bench, "c").text == f"{text}, 1 of them until the worker has answered"
    assert waits(bench, "c") == [
        {"phase": "waiting", "reason": "row", "role": "both", "worker": "b"}
    ]


def test_behind_the_head_the_place_and_what_the_head_waits_for_are_told() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=1))
    bench.turn(submitted("runs", 4, 4))
    bench.turn(submitted("low", 4, 4, priority=-1), submitted("head", 4, 4, priority=1))
    bench.turn(submitted("x", 4, 4), submitted("y", 4, 4))
    assert [why(bench, name).ahead for name in ("head", "x", "y", "low")] == [0, 1, 2, 3]
    head = why(bench, "head")
    assert head.kind is WaitKind.ROW
    assert why(bench, "y") == Waiting(
        RequestId("y"),
        Phase.WAITING,
        WaitKind.TURN,
        f"y waits in the queue, behind 2 others; {head.text}",
        ahead=2,
        first=RequestId("head"),
    )
    assert "behind 1 other; head waits" in why(bench, "x").text
    turn = {"phase": "waiting", "reason": "turn", "first": "head"}
    assert waits(bench, "low") == [turn | {"queue_length": 2}]
    assert waits(bench, "x") == waits(bench, "y") == [turn | {"queue_length": 4}]


def test_what_has_its_turn_says_anew_what_it_waits_for() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=1))
    bench.turn(submitted("runs", 4, 4))
    bench.turn(submitted("x", 4, 4), submitted("y", 4, 4))
    for _ in range(3):
        bench.turn()
    bench.turn(cancelled("x"))
    assert [fields["reason"] for fields in waits(bench, "y")] == ["turn", "row"]


def test_prompts_wait_for_a_destination_of_those_that_are_finished() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY),
        joined(D, Role.DECODE, (8,), FULL_ONLY),
        settings=CoreSettings(handoff_waiting_count_max=1),
    )
    bench.hand_over("runs", 20, 10)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("done", 8, 10)
    bench.turn(submitted("r", 8, 10))
    first = why(bench, "done")
    assert (first.kind, first.role, first.worker) == (WaitKind.PAGES, Role.DECODE, D)
    assert why(bench, "r") == Waiting(
        RequestId("r"),
        Phase.WAITING,
        WaitKind.DESTINATION,
        "r waits in the queue, since 1 finished prompt without a decode worker are as many "
        f"as there may be; {first.text}",
        ahead=1,
        first=RequestId("done"),
    )
    assert waits(bench, "r") == [
        {"phase": "waiting", "reason": "destination", "first": "done", "ahead": 1}
    ]


# --- The hand-off ---


def test_finished_prompts_wait_for_pages_of_a_decode_worker_in_order() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY), joined(D, Role.DECODE, (10,), FULL_ONLY)
    )
    bench.hand_over("runs", 28, 4)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("a", 16, 8)
    bench.prefill("b", 16, 8)
    bench.prefill("c", 16, 8)
    found = Waiting(
        RequestId("a"),
        Phase.HANDING_OFF,
        WaitKind.PAGES,
        "a waits for 4 more pages of the full pool of decode worker d: "
        "it is handed over when 6 are available, and 2 are; runs has 8",
        role=Role.DECODE,
        worker=D,
        pool="full",
        pages_short=4,
        pages_needed=6,
        pages_available=2,
        holders=holders(runs=8),
    )
    assert why(bench, "a") == found
    assert why(bench, "c") == Waiting(
        RequestId("c"),
        Phase.HANDING_OFF,
        WaitKind.TURN,
        "c has finished its prompt and waits for a decode worker, behind 2 others; "
        f"{found.text}",
        ahead=2,
        first=RequestId("a"),
    )
    assert [fields["reason"] for fields in waits(bench, "a")] == ["pages"]
    turn = {"phase": "handing_off", "reason": "turn", "first": "a"}
    assert waits(bench, "b") == [turn | {"queue_length": 2}]
    assert waits(bench, "c") == [turn | {"queue_length": 3}]


def test_a_request_whose_pages_are_copied_waits_for_the_copy() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY), joined(D, Role.DECODE, (50,), FULL_ONLY)
    )
    bench.prefill("a", 16, 8)
    assert why(bench, "a") == Waiting(
        RequestId("a"),
        Phase.HANDING_OFF,
        WaitKind.ANSWER,
        "a is handed over: decode worker d copies its pages",
        role=Role.DECODE,
        worker=D,
    )


# --- A place of its own ---


def test_a_prompt_waits_for_its_chunk_or_for_its_turn() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY))
    bench.turn(submitted("a", 20, 4), submitted("b", 3, 4))
    found = why(bench, "a")
    assert (found.kind, found.phase, found.worker) == (WaitKind.ANSWER, Phase.PREFILLING, B)
    assert found.text == "a waits for both worker b to run 8 of its 20 prompt tokens"
    assert why(bench, "b") == Waiting(
        RequestId("b"),
        Phase.PREFILLING,
        WaitKind.TURN,
        f"b waits for its prompt's turn on both worker b, behind 1 other; {found.text}",
        ahead=1,
        first=RequestId("a"),
        role=Role.BOTH,
        worker=B,
    )


def test_a_row_that_decodes_waits_for_its_worker() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50, 50)))
    bench.decode_whole("a", 8, 9)
    found = why(bench, "a")
    assert (found.kind, found.phase, found.worker) == (WaitKind.ANSWER, Phase.DECODING, B)
    assert found.text == "a waits for both worker b to bring its next tokens"


def test_a_starving_row_waits_for_pages_that_drain_and_then_goes_on() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (6,), FULL_ONLY))
    bench.decode_whole("a", 4, 20)
    bench.turn(submitted("b", 5, 12))
    row = bench.row_of("b")
    bench.turn(report(B, bench.worker(B).seq, chunks={row: 5}, tokens={row: 1}))
    while not (records := goes_on_and_waits(bench, "a")):
        bench.turn(report(B, bench.worker(B).seq - 1, tokens={0: 1}))
    assert (why(bench, "a").kind, records) == (WaitKind.PAGES, [LogEvent.REQUEST_WAITS])
    # "b" has a page that it might give back, and does not. Then it gives way.
    bench.turn(report(B, bench.worker(B).seq, trimmed={row: (0,)}))
    records = goes_on_and_waits(bench, "a")
    assert why(bench, "a") == Waiting(
        RequestId("a"),
        Phase.DECODING,
        WaitKind.DRAINING,
        "a waits for 1 more page of the full pool of both worker b: "
        "3 are draining, and free when it has answered",
        role=Role.BOTH,
        worker=B,
        pool="full",
        pages_short=1,
        pages_needed=1,
        pages_draining=3,
        holders=holders(a=3),
    )
    bench.turn()
    assert goes_on_and_waits(bench, "a") == records == [LogEvent.REQUEST_WAITS] * 2
    bench.turn(report(B, bench.worker(B).seq))
    assert goes_on_and_waits(bench, "a") == [*records, LogEvent.REQUEST_GOES_ON]
    assert why(bench, "a").kind is WaitKind.ANSWER


def goes_on_and_waits(bench: CoreBench, name: str) -> list[LogEvent]:
    wanted = (LogEvent.REQUEST_WAITS, LogEvent.REQUEST_GOES_ON)
    return [r.event for r in bench.records if r.event in wanted and r.request_id == name]


# --- What it costs, and what it leaves alone ---


def test_no_plan_walks_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=1))
    bench.turn(submitted("runs", 4, 4))
    for index in range(200):
        bench.core.apply(submitted(f"r{index}", 4, 4), 0)
    assert len(waits(bench, "r1")) == 0

    def walk(queue: WaitingQueue) -> object:
        raise AssertionError("the queue is walked")

    monkeypatch.setattr(WaitingQueue, "__iter__", walk)
    for _ in range(3):
        bench.core.plan(0)
    done = report(
        B, bench.worker(B).seq, chunks={0: 4}, tokens={0: 1}, ended={0: EndReason.END_TOKEN}
    )
    bench.core.apply(done, 0)
    bench.core.plan(0)
    bench.core.apply(report(B, bench.worker(B).seq), 0)
    bench.core.plan(0)
    assert bench.phase("r0") is Phase.PREFILLING


def test_an_explanation_changes_nothing() -> None:
    def run(*, asks: bool) -> list[Command]:
        bench = CoreBench(joined(B, Role.BOTH, (8, 6), rows=2))
        commands: list[Command] = []

        def turn(*events: Event) -> None:
            commands.extend(bench.turn(*events))
            for name in list(bench.core.fleet.requests) if asks else ():
                assert why(bench, name).text.startswith(f"{name} ")

        for name in "abcd":
            turn(submitted(name, 8, 12))
        while bench.core.fleet.requests:
            worker = bench.worker(B)
            seats = tuple(worker.seats.values())
            tokens: dict[int, int] = {
                seat.row: 1 for seat in seats if seat.chunk_until in (None, 8)
            }
            rows = [s.row for s in seats if s.row in tokens and s.request.output_count == 11]
            turn(
                report(
                    B,
                    worker.seq,
                    chunks={s.row: s.chunk_until for s in seats if s.chunk_until is not None},
                    tokens=tokens,
                    ended=dict.fromkeys(rows, EndReason.LENGTH),
                )
            )
        return commands + list(bench.records)

    assert run(asks=True) == run(asks=False)
