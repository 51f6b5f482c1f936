"""A request is cancelled in every phase; its pages and its row come back when that is safe."""

import pytest

from fakes.core_bench import (
    B,
    CoreBench,
    D,
    P,
    cancelled,
    finished,
    joined,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, PlanSeq, Role, Row, Stop
from tidegate.scheduler.commands import EmitTokens, FinishRequest, SendPlan, StartRow
from tidegate.scheduler.events import ClientGone, ClientId
from tidegate.scheduler.phases import Phase

ROW = Row(0)
COUNTS = (12, 6)


def pair(rows: int = 4) -> CoreBench:
    return CoreBench(
        joined(P, Role.PREFILL, COUNTS, rows=rows), joined(D, Role.DECODE, COUNTS, rows=rows)
    )


def free_now(bench: CoreBench) -> bool:
    return bench.free(P) == list(COUNTS) and bench.free(D) == list(COUNTS)


def test_while_it_waits_it_leaves_at_once() -> None:
    bench = pair(rows=1)
    bench.turn(submitted("runs", 8, 4))
    bench.turn(submitted("r", 8, 4), submitted("next", 8, 4))
    commands = bench.turn(cancelled("r"))
    assert finished(commands)["r"].reason is EndReason.CANCELLED
    assert commands == [finished(commands)["r"]]
    bench.turn(cancelled("runs"))
    bench.turn(report(P, 2))
    assert bench.phase("next") is Phase.PREFILLING


def test_pages_stay_held_until_the_worker_answers_a_chunk_in_flight() -> None:
    bench = pair()
    bench.turn(submitted("r", 16, 4))
    free = bench.free(P)
    commands = bench.turn(cancelled("r"))
    assert plan_of(commands, P).operations == (Stop(ROW),)
    assert bench.free(P) == free and bench.draining(P) == [4, 2]
    # The launch made under plan 1 is over; whether plan 2 has been seen is not known.
    assert bench.turn(report(P, 1, chunks={0: 8})) == []
    assert bench.free(P) == free
    bench.turn(report(P, 2))
    assert free_now(bench) and bench.core.is_idle


def test_a_cancelled_chunk_does_not_hold_up_the_next_prompt() -> None:
    bench = pair()
    bench.turn(submitted("r", 16, 4), submitted("next", 16, 4))
    plan = plan_of(bench.turn(cancelled("r")), P)
    assert [type(operation).__name__ for operation in plan.operations] == [
        "Stop",
        "Grow",
        "Chunk",
    ]


def test_between_its_chunks_and_its_hand_off_the_source_is_withdrawn() -> None:
    # The decode worker is full, so the finished prompt waits for it.
    bench = pair()
    bench.hand_over("first", 40, 8)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("r", 16, 20)
    assert bench.phase("r") is Phase.HANDING_OFF
    assert not bench.worker(D).tickets
    commands = bench.turn(cancelled("r"))
    # The row has ended by itself: there is nothing to stop.
    assert plan_of(commands, P).operations == ()
    assert bench.draining(P) != [0, 0]
    bench.turn(report(P, bench.worker(P).seq))
    assert bench.free(P) == list(COUNTS)


def test_during_a_pull_each_side_waits_for_its_own_worker() -> None:
    bench = pair()
    bench.prefill("r", 8, 4)
    source_seq = bench.worker(P).seq + 1
    commands = bench.turn(cancelled("r"))
    assert plan_of(commands, P) == SendPlan(P, PlanSeq(source_seq), ())
    assert plan_of(commands, D) == SendPlan(D, PlanSeq(3), ())
    bench.turn(report(P, source_seq))
    assert bench.free(P) == list(COUNTS)
    # The target may still be copying: its pages are not free on the source's word.
    assert bench.draining(D) == [2, 2]
    stale = bench.core.fleet.stale_count
    assert bench.turn(report(D, 2, fetched={1: ""})) == []
    assert bench.core.fleet.stale_count == stale + 1
    assert bench.draining(D) == [2, 2]
    bench.turn(report(D, 3))
    assert free_now(bench)


def test_while_it_decodes_late_tokens_are_dropped() -> None:
    bench = pair()
    bench.hand_over("r", 8, 9)
    bench.turn(report(D, 3, tokens={0: 2}))
    commands = bench.turn(cancelled("r", kept=2))
    assert finished(commands)["r"].usage.output_tokens == 2
    assert plan_of(commands, D).operations == (Stop(ROW),)
    late = report(D, 3, tokens={0: 1}, ended={0: EndReason.END_TOKEN})
    assert bench.turn(late) == []
    assert bench.core.fleet.stale_count == 2
    bench.turn(report(D, bench.worker(D).seq), report(P, bench.worker(P).seq))
    assert free_now(bench)


def test_a_row_number_is_not_used_again_before_its_last_user_is_gone() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS, rows=1))
    bench.turn(submitted("r", 8, 9))
    bench.turn(cancelled("r"), submitted("next", 8, 9))
    assert bench.phase("next") is Phase.WAITING
    # The answer to the row's last user is not taken for one of its next.
    assert bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1})) == []
    commands = bench.turn(report(B, 2))
    (start, *_) = plan_of(commands, B).operations
    assert isinstance(start, StartRow)
    assert (start.row, start.request_id) == (ROW, "next")


def test_row_numbers_go_round_before_one_is_used_again() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS, rows=3))
    rows: list[int] = []
    for index in range(5):
        plan = plan_of(bench.turn(submitted(f"r{index}", 8, 9)), B)
        rows += [op.row for op in plan.operations if isinstance(op, StartRow)]
        bench.turn(cancelled(f"r{index}"))
        bench.turn(report(B, bench.worker(B).seq))
    assert rows == [0, 1, 2, 0, 1]


def test_a_request_that_ends_in_the_turn_in_which_it_would_begin_is_never_started() -> None:
    bench = pair()
    bench.prefill("r", 8, 4)
    answered = report(D, 2, fetched={1: ""})
    commands = bench.turn(answered, cancelled("r"))
    assert finished(commands)["r"].reason is EndReason.CANCELLED
    assert plan_of(commands, D).operations == ()
    bench.turn(report(D, 3), report(P, bench.worker(P).seq))
    assert free_now(bench)


@pytest.mark.parametrize(("kept", "billed"), [(0, 0), (2, 2), (50, 3), (-1, 0)])
def test_the_tokens_that_the_client_keeps_are_billed(kept: int, billed: int) -> None:
    bench = pair()
    bench.hand_over("r", 8, 9)
    bench.turn(report(D, 3, tokens={0: 2}))
    commands = bench.turn(cancelled("r", kept=kept, reason=EndReason.STOP_TEXT))
    answer = finished(commands)["r"]
    assert (answer.usage.output_tokens, answer.reason) == (billed, EndReason.STOP_TEXT)


def test_a_cancel_of_a_request_that_has_ended_is_nothing() -> None:
    bench = pair()
    bench.turn(submitted("r", 8, 1))
    done = report(P, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    bench.turn(done)
    assert bench.turn(cancelled("r"), cancelled("never")) == []


def test_a_client_that_goes_away_takes_all_its_requests_with_it_and_no_other() -> None:
    bench = pair()
    bench.turn(submitted("a", 8, 4, client="gone"), submitted("c", 8, 4, client="stays"))
    bench.turn(*(submitted(f"a{i}", 8, 4, client="gone") for i in range(8)))
    commands = bench.turn(ClientGone(ClientId("gone"), "it went away"))
    ended = [c.request_id for c in commands if isinstance(c, FinishRequest)]
    assert ended == ["a", *(f"a{i}" for i in range(8))]
    assert list(bench.core.fleet.requests) == ["c"]
    gone = [r for r in bench.records if r.event is LogEvent.CLIENT_GONE]
    assert gone[0].fields["requests"] == 9
    assert bench.turn(ClientGone(ClientId("gone"), "it went away")) == []


def test_tokens_that_come_with_the_cancel_are_delivered_before_the_end() -> None:
    bench = pair()
    bench.hand_over("r", 8, 9)
    commands = bench.turn(report(D, 3, tokens={0: 1}), cancelled("r", kept=2))
    assert [type(c) for c in commands[:2]] == [EmitTokens, FinishRequest]
    assert bench.phase("r") is Phase.FINISHED
