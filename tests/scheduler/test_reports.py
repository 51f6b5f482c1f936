"""Answers that contradict the plan end their request, and never the scheduler."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    D,
    P,
    cancelled,
    emitted,
    finished,
    joined,
    lost,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, RequestId, Role, Row, Stop
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.events import Reported, RowFaulted
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings

COUNTS = (12, 6)
LENGTH = EndReason.LENGTH


def pair() -> CoreBench:
    return CoreBench(joined(P, Role.PREFILL, COUNTS), joined(D, Role.DECODE, COUNTS))


def expect_error(bench: CoreBench, event: Reported, text: str) -> None:
    """The answer ends request "r" with an error; the next request runs as ever."""
    commands = bench.turn(event)
    answer = finished(commands)["r"]
    assert (answer.reason, answer.status) == (EndReason.ERROR, 500)
    assert text in answer.text
    assert [r.request_id for r in bench.records if r.event is LogEvent.INTERNAL_ERROR] == ["r"]
    for name, worker in tuple(bench.core.fleet.workers.items()):
        bench.turn(report(name, worker.seq))
        assert bench.free(name) == list(worker.books.page_counts)
    assert bench.core.is_idle


@pytest.mark.parametrize("until", [4, 9, 16])
def test_a_chunk_that_was_not_given(until: int) -> None:
    bench = pair()
    bench.turn(submitted("r", 16, 4))
    expect_error(bench, report(P, 1, chunks={0: until}), f"a chunk until {until} that")


def test_a_chunk_that_is_answered_twice() -> None:
    bench = pair()
    bench.turn(submitted("r", 8, 4))
    bench.apply(report(P, 1, chunks={0: 8}))
    expect_error(bench, report(P, 1, chunks={0: 8}), "a chunk until 8 that it was not given")


def test_tokens_before_the_prompt_is_done() -> None:
    bench = pair()
    bench.turn(submitted("r", 16, 4))
    expect_error(bench, report(P, 1, chunks={0: 8}, tokens={0: 1}), "1 tokens that it cannot")


def test_no_tokens_at_all() -> None:
    bench = pair()
    bench.hand_over("r", 8, 4)
    expect_error(bench, report(D, 3, tokens={0: 0}), "0 tokens that it cannot")


def test_more_tokens_than_were_asked_for() -> None:
    bench = pair()
    bench.hand_over("r", 8, 4)
    expect_error(bench, report(D, 3, tokens={0: 4}), "4 tokens that it cannot have sampled")


def test_more_than_one_token_from_a_prefill_worker() -> None:
    bench = pair()
    bench.turn(submitted("r", 8, 4))
    expect_error(bench, report(P, 1, chunks={0: 8}, tokens={0: 2}), "2 tokens that it cannot")


def test_tokens_for_positions_without_a_page() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS))
    bench.turn(submitted("r", 8, 20))
    # Two window pages cover positions up to 8: one more token than that cannot be.
    wrong = report(B, 1, chunks={0: 8}, tokens={0: 2})
    expect_error(bench, wrong, "2 tokens that it cannot have sampled")


def test_tokens_of_a_row_that_has_ended() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY), joined(D, Role.DECODE, (4,), FULL_ONLY)
    )
    bench.prefill("r", 8, 4)
    expect_error(bench, report(P, 1, tokens={0: 1}), "1 tokens that it cannot have sampled")


def test_tokens_of_a_row_that_was_not_started() -> None:
    bench = pair()
    bench.prefill("r", 8, 4)
    expect_error(bench, report(D, 2, tokens={0: 1}), "1 tokens that it cannot have sampled")


def test_an_end_that_comes_too_early() -> None:
    bench = pair()
    bench.hand_over("r", 8, 4)
    wrong = report(D, 3, tokens={0: 1}, ended={0: LENGTH})
    expect_error(bench, wrong, "the end of its row before its last token")


def test_an_end_without_a_token() -> None:
    bench = pair()
    bench.turn(submitted("r", 8, 4))
    wrong = report(P, 1, chunks={0: 8}, ended={0: LENGTH})
    expect_error(bench, wrong, "the end of its row (length)")


def test_an_end_that_is_told_twice() -> None:
    bench = pair()
    bench.prefill("r", 8, 4)
    expect_error(bench, report(P, 1, ended={0: LENGTH}), "the end of its row (length)")


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.ERROR, EndReason.TIMEOUT])
def test_an_end_for_a_reason_that_no_row_has(reason: EndReason) -> None:
    bench = pair()
    bench.hand_over("r", 8, 4)
    expect_error(bench, report(D, 3, ended={0: reason}), f"the end of its row ({reason.value})")


@pytest.mark.parametrize("completed", [0, 99])
def test_a_report_of_plans_that_cannot_be_completed_is_dropped_whole(completed: int) -> None:
    bench = pair()
    bench.hand_over("r", 8, 4)
    bench.turn(report(D, 3))
    assert bench.turn(report(D, completed, tokens={0: 1})) == []
    assert bench.phase("r") is Phase.DECODING
    assert bench.worker(D).completed == 3
    (record,) = [r for r in bench.records if r.event is LogEvent.INTERNAL_ERROR]
    assert f"plan {completed} is completed" in str(record.fields["text"])


def test_of_one_report_good_rows_are_delivered_whatever_the_others_are() -> None:
    """Rows 0 to 3: within its pages, ended, with too many tokens, and at its event."""
    settings = CoreSettings(
        chunk_tokens=Tokens(8), ahead_tokens=Tokens(2), ahead_tokens_max=Tokens(2)
    )
    bench = CoreBench(joined(B, Role.BOTH, (40,), FULL_ONLY), settings=settings)
    names = ("a", "b", "c", "d")  # All have pages for 8 positions.
    bench.turn(*(submitted(name, 4, 12) for name in names))
    bench.turn(report(B, 1, chunks={0: 4}, tokens={0: 1}))
    bench.turn(report(B, 1, chunks={1: 4}, tokens={1: 1}))
    bench.turn(report(B, 1, chunks={2: 4}, tokens={2: 1}))
    bench.turn(report(B, bench.worker(B).seq, chunks={3: 4}, tokens={3: 1}))
    bench.turn(cancelled("b"))
    arrays = bench.worker(B).rows
    assert arrays.next_event.tolist() == [8, 0, 8, 8]
    commands = bench.turn(
        report(B, bench.worker(B).seq - 1, tokens={0: 1, 1: 1, 2: 9, 3: 4}, number=7)
    )
    assert finished(commands)["c"].text.endswith("9 tokens that it cannot have sampled")
    assert emitted(1, 1, 1, 1, report=7, left_out=(1, 2)) in commands
    assert bench.core.fleet.stale_count == 1
    requests = bench.core.fleet.requests
    assert {name: each.output_count for name, each in requests.items()} == {"a": 2, "d": 5}


def test_answers_about_rows_and_tickets_that_never_were_are_counted() -> None:
    bench = pair()
    wrong = report(P, 0, chunks={3: 8}, tokens={2: 1}, ended={1: LENGTH}, fetched={7: ""})
    assert bench.turn(wrong) == []
    assert bench.core.fleet.stale_count == 4


# --- Faults ---


def fault(row: int, name: str) -> RowFaulted:
    return RowFaulted(B, Row(row), RequestId(name), "out_of_memory", "9 MB are missing")


def test_a_row_that_failed_ends_its_request_and_no_other() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS))
    bench.turn(submitted("r", 8, 4), submitted("s", 8, 4))
    commands = bench.turn(fault(0, "r"))
    answer = finished(commands)["r"]
    assert (answer.reason, answer.status) == (EndReason.ERROR, 500)
    assert answer.text == "out_of_memory: 9 MB are missing"
    # The worker has forgotten the row itself.
    assert Stop(Row(0)) not in plan_of(commands, B).operations
    assert bench.phase("s") is Phase.PREFILLING
    assert bench.draining(B)[0] > 0
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.draining(B) == [0, 0]


def test_a_late_fault_is_not_taken_for_one_of_another_request() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS))
    bench.turn(submitted("r", 8, 4))
    assert bench.turn(fault(0, "someone"), fault(3, "r")) == []
    bench.turn(lost(B))
    assert bench.turn(fault(0, "r")) == []
    assert bench.core.fleet.stale_count == 3
