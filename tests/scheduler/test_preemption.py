"""Who gives way when a decode worker has no page left, and how what gave way goes on."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    D,
    P,
    emitted,
    finished,
    grow,
    joined,
    lost,
    plan_of,
    report,
    run,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
    Grow,
    RequestId,
    Role,
    Row,
    Stop,
    WorkerId,
)
from tidegate.kvcache.demand import Leg
from tidegate.scheduler.commands import Command, FinishRequest, SendPlan, StartRow
from tidegate.scheduler.losses import RESTART_COUNT_MAX
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Request

D2 = WorkerId("d2")


def answer(bench: CoreBench, worker: WorkerId, tokens: dict[int, int]) -> list[Command]:
    return bench.turn(report(worker, bench.worker(worker).seq, tokens=tokens))


def request(bench: CoreBench, name: str) -> Request:
    return bench.core.fleet.requests[RequestId(name)]


def prefill_again(bench: CoreBench, name: str) -> list[Command]:
    """Run all chunks of a prompt on its worker, up to the token that it ends with."""
    commands: list[Command] = []
    while bench.phase(name) is Phase.PREFILLING:
        seat = request(bench, name).source
        assert seat is not None and seat.chunk_until is not None
        row, until = seat.row, seat.chunk_until
        is_last = until == seat.lengths.prompt
        is_source = is_last and seat.leg is Leg.SOURCE
        commands += bench.turn(
            report(
                seat.worker.worker_id,
                seat.worker.seq,
                chunks={row: until},
                tokens={row: 1} if is_last else None,
                ended={row: EndReason.LENGTH} if is_source else None,
            )
        )
    return commands


def decode_to_end(bench: CoreBench, name: str) -> FinishRequest:
    """Have a decoding row bring its tokens one by one, and then end."""
    (seat,) = request(bench, name).seats
    worker, row = seat.worker, seat.row
    bench.turn(report(worker.worker_id, worker.seq))  # What drains is free.
    for _ in range(request(bench, name).remaining.output - 1):
        bench.turn(report(worker.worker_id, worker.seq, tokens={row: 1}))
    last = report(worker.worker_id, worker.seq, tokens={row: 1}, ended={row: EndReason.LENGTH})
    return finished(bench.turn(last))[name]


def two_that_decode(
    *, priorities: tuple[int, int] = (0, 0), prefill_pages: int = 50
) -> CoreBench:
    """ "a" and then "b" decode on D: 8 prompt tokens and 12 new ones, 5 pages of 4 each.

    D has seven pages. Each has three, which cover 12 positions; one is left.
    """
    bench = CoreBench(
        joined(P, Role.PREFILL, (prefill_pages,), FULL_ONLY),
        joined(D, Role.DECODE, (7,), FULL_ONLY),
    )
    for name, priority in zip("ab", priorities, strict=True):
        bench.turn(submitted(name, 8, 12, priority=priority))
        prefill_again(bench, name)
        ticket = request(bench, name).ticket
        assert ticket is not None
        bench.turn(report(D, bench.worker(D).seq, fetched={ticket: ""}))
        bench.turn(report(P, bench.worker(P).seq))
    assert (bench.row_of("a"), bench.row_of("b")) == (0, 1) and bench.free(D) == [1]
    return bench


def preempted(bench: CoreBench) -> list[tuple[str | None, object]]:
    return [
        (record.request_id, record.fields["by"])
        for record in bench.records
        if record.event is LogEvent.REQUEST_PREEMPTED
    ]


def waits(bench: CoreBench, name: str) -> list[tuple[object, ...]]:
    return [
        tuple(map(record.fields.get, ("reason", "pool", "worker", "pages_short")))
        for record in bench.records
        if record.event is LogEvent.REQUEST_WAITS and record.request_id == name
    ]


def test_what_a_request_waits_for_is_said_anew_when_it_waits_again() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (7,), FULL_ONLY))
    bench.decode_whole("a", 4, 20)
    bench.turn(submitted("x", 12, 1))
    row = bench.row_of("x")
    bench.turn(submitted("b", 8, 12))
    short = ("pages", "full", "b")
    assert [wait[:3] for wait in waits(bench, "b")] == [short]
    bench.turn(report(B, bench.worker(B).seq, chunks={row: 8}))
    last = report(
        B, bench.worker(B).seq, chunks={row: 12}, tokens={row: 1}, ended={row: EndReason.LENGTH}
    )
    bench.turn(last)
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.phase("b") is Phase.PREFILLING
    prefill_again(bench, "b")
    while not preempted(bench):
        answer(bench, B, {0: 1})
    assert preempted(bench) == [("b", "a")] and bench.phase("b") is Phase.WAITING
    assert [wait[:3] for wait in waits(bench, "b")] == [
        short,
        ("draining", "full", "b"),  # Those of "x", which has ended.
        short,
    ]


def test_the_lowest_rank_gives_way_and_is_resumed_with_its_tokens() -> None:
    bench = two_that_decode()
    # At position 12 the row has come to the end of its pages: it takes the last one.
    commands = answer(bench, D, {1: 4})
    assert plan_of(commands, D).operations == (grow(1, 0, 6),)
    # "a" has come to the end of its pages, too. Then "b" gives way.
    seq = bench.worker(D).seq
    commands = answer(bench, D, {0: 4})
    b = RequestId("b")
    pages = (run(0, 0, 1, 2, 3),)
    start = StartRow(Row(2), b, position=0, output_index=5, limit=13, pages=pages)
    assert commands == [
        emitted(1),
        SendPlan(P, bench.worker(P).seq, (start, Chunk(Row(2), 8, sample=False))),
        SendPlan(D, bench.worker(D).seq, (Stop(Row(1)),)),
    ]
    assert preempted(bench) == [("b", "a")]
    seat = request(bench, "b").source
    assert seat is not None and seat.leg is Leg.SOURCE
    assert request(bench, "b").preemption_count == 1 and bench.phase("a") is Phase.DECODING
    # Its pages drain: "a" gets none before the worker has passed the plan that stopped the row.
    assert bench.draining(D) == [4] and bench.free(D) == [0]
    # Tokens that were under way when it was stopped are dropped, and sampled anew.
    assert bench.turn(report(D, seq, tokens={1: 2})) == []
    assert bench.core.fleet.stale_count == 1 and bench.draining(D) == [4]
    commands = bench.turn(report(D, seq + 1))
    assert plan_of(commands, D).operations == (grow(0, 0, 3),)
    # The numbers of its tokens go on, and it moves back when there is room.
    assert emitted(5) in prefill_again(bench, "b")
    assert bench.phase("b") is Phase.HANDING_OFF and request(bench, "b").ticket is None
    # It needs four, and one more for the row that grows: three are there.
    assert waits(bench, "b") == [("pages", "full", "d", 2)]
    assert decode_to_end(bench, "a").usage.output_tokens == 12
    (pull,) = plan_of(bench.turn(report(D, bench.worker(D).seq)), D).operations
    assert isinstance(pull, Fetch) and pull.length == 13
    commands = bench.turn(report(D, bench.worker(D).seq, fetched={pull.ticket: ""}))
    (begun,) = plan_of(commands, D).operations
    assert isinstance(begun, StartRow)
    assert (begun.position, begun.output_index, begun.limit) == (13, 6, 19)
    end = decode_to_end(bench, "b")
    assert (end.reason, end.usage.prompt_tokens) == (EndReason.LENGTH, 8)
    assert end.usage.output_tokens == 12
    bench.turn(report(D, bench.worker(D).seq), report(P, bench.worker(P).seq))
    assert bench.free(D) == [7] and bench.free(P) == [50] and bench.core.is_idle


def test_a_row_that_starves_gives_way_itself_if_it_is_the_lowest() -> None:
    bench = two_that_decode()
    answer(bench, D, {0: 4})  # "a" takes the last page.
    answer(bench, D, {1: 4})
    assert preempted(bench) == [("b", "b")]
    assert bench.phase("a") is Phase.DECODING and bench.phase("b") is Phase.PREFILLING


def test_rank_is_by_priority_and_then_by_the_order_of_acceptance() -> None:
    bench = two_that_decode(priorities=(0, 1))
    answer(bench, D, {0: 4})  # "a" takes the last page, and "b" starves: "a" gives way.
    answer(bench, D, {1: 4})
    assert preempted(bench) == [("a", "b")]
    assert bench.phase("b") is Phase.DECODING


@pytest.mark.parametrize("priorities", [(0, 0), (0, 1), (1, 0)])
def test_the_highest_rank_never_gives_way_and_gets_to_its_end(
    priorities: tuple[int, int],
) -> None:
    bench = two_that_decode(priorities=priorities)
    highest = "b" if priorities[1] > priorities[0] else "a"
    row = int(bench.row_of(highest))
    for name in "ab":  # Both have come to the end of their pages.
        bench.apply(report(D, bench.worker(D).seq, tokens={bench.row_of(name): 4}))
    bench.turn()
    for _ in range(7):
        bench.turn(report(D, bench.worker(D).seq))
        count = request(bench, highest).output_count + 1
        ended = {row: EndReason.LENGTH} if count == 12 else None
        bench.turn(report(D, bench.worker(D).seq, tokens={row: 1}, ended=ended))
    assert bench.phase(highest) is Phase.FINISHED
    assert {name for name, _ in preempted(bench)} <= {"a", "b"} - {highest}


def test_pages_that_drain_are_waited_for_before_anybody_gives_way() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (8,), FULL_ONLY))
    for name in "abc":
        bench.decode_whole(name, 4, 12)
    answer(bench, B, {0: 4, 1: 4})  # Both take a third page, for positions 8 to 11.
    assert bench.free(B) == [0]
    seq = bench.worker(B).seq
    bench.apply(report(B, seq, tokens={2: 1}, ended={2: EndReason.END_TOKEN}))
    bench.turn(report(B, seq, tokens={0: 4, 1: 4}))
    assert bench.draining(B) == [2] and preempted(bench) == []
    commands = bench.turn(report(B, bench.worker(B).seq))
    assert {op.row for op in plan_of(commands, B).operations if isinstance(op, Grow)} == {0, 1}
    assert preempted(bench) == []


def test_a_request_too_long_for_every_prefill_worker_runs_whole_where_it_decodes() -> None:
    # The prompt of 8 fills the prefill worker; with two tokens it takes three pages.
    bench = two_that_decode(prefill_pages=2)
    answer(bench, D, {1: 4})
    answer(bench, D, {0: 4})
    assert preempted(bench) == [("b", "a")] and bench.phase("b") is Phase.WAITING
    decode_to_end(bench, "a")
    commands = bench.turn(report(D, bench.worker(D).seq))
    start, chunk = plan_of(commands, D).operations
    assert isinstance(start, StartRow)
    assert (start.position, start.output_index, start.limit) == (0, 5, 19)
    assert chunk == Chunk(start.row, 8, sample=False)
    seat = request(bench, "b").source
    assert seat is not None and seat.leg is Leg.WHOLE
    prefill_again(bench, "b")
    assert bench.phase("b") is Phase.DECODING
    assert decode_to_end(bench, "b").usage.output_tokens == 12


def test_a_request_whose_pull_is_under_way_keeps_its_prompt_and_waits_for_a_destination() -> (
    None
):
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY), joined(D, Role.DECODE, (7,), FULL_ONLY)
    )
    bench.hand_over("a", 8, 12)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("b", 8, 12)
    source, ticket = request(bench, "b").source, request(bench, "b").ticket
    assert source is not None and ticket is not None
    answer(bench, D, {0: 4})  # The page that is left; then it starves at 16.
    commands = answer(bench, D, {0: 4})
    assert preempted(bench) == [("b", "a")]
    b = request(bench, "b")
    assert b.phase is Phase.HANDING_OFF and b.source is source and b.ticket is None
    assert not [c for c in commands if isinstance(c, SendPlan) and c.worker == P]
    # Nothing is known of the row there, so nothing is stopped; the pull's pages drain.
    assert plan_of(commands, D).operations == () and bench.draining(D)[0] > 0
    seq = bench.worker(D).seq
    bench.turn(report(D, seq - 1, fetched={ticket: ""}))
    assert bench.core.fleet.stale_count == 1 and b.phase is Phase.HANDING_OFF
    bench.turn(report(D, seq))
    decode_to_end(bench, "a")
    bench.turn(report(D, bench.worker(D).seq))
    assert b.target is not None and b.ticket not in (None, ticket)


# --- Lost workers ---


def test_a_request_of_a_lost_decode_worker_begins_anew_with_its_tokens_on_another() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY),
        joined(D, Role.DECODE, (9,), FULL_ONLY),
        joined(D2, Role.DECODE, (8,), FULL_ONLY),
    )
    bench.hand_over("r", 8, 12)
    bench.turn(report(P, bench.worker(P).seq))
    answer(bench, D, {0: 2})
    commands = bench.turn(lost(D))
    assert finished(commands) == {}
    (start, _) = [op for op in plan_of(commands, P).operations if not is_peer(op)]
    assert isinstance(start, StartRow)
    assert (start.position, start.output_index, start.limit) == (0, 3, 11)
    assert emitted(3) in prefill_again(bench, "r")
    ticket = request(bench, "r").ticket
    assert ticket is not None
    commands = bench.turn(report(D2, bench.worker(D2).seq, fetched={ticket: ""}))
    (start,) = plan_of(commands, D2).operations
    assert isinstance(start, StartRow)
    assert (start.position, start.output_index, start.limit) == (11, 4, 19)
    assert decode_to_end(bench, "r").usage.output_tokens == 12


def is_peer(operation: object) -> bool:
    return not isinstance(operation, StartRow | Chunk)


def test_a_request_begins_anew_three_times_at_most() -> None:
    names = [WorkerId(f"b{index}") for index in range(RESTART_COUNT_MAX + 2)]
    bench = CoreBench(*(joined(name, Role.BOTH, (8,), FULL_ONLY) for name in names))
    bench.turn(submitted("r", 8, 12))
    for count in range(RESTART_COUNT_MAX):
        worker = request(bench, "r").workers["prefill"]
        assert finished(bench.turn(lost(worker))) == {}
        assert request(bench, "r").restart_count == count + 1
        assert bench.phase("r") is Phase.PREFILLING
    worker = request(bench, "r").workers["prefill"]
    end = finished(bench.turn(lost(worker)))["r"]
    assert (RESTART_COUNT_MAX, end.reason, end.status) == (3, EndReason.ERROR, 503)
    assert end.text == (
        f"worker {worker} is gone: it was killed; the request has begun anew 3 times already"
    )
