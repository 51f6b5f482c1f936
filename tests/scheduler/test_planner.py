"""Several requests at once: who goes first, who waits for what, and that each has an end."""

from msgspec.structs import replace

from fakes.core_bench import (
    FULL_ONLY,
    HYBRID,
    SETTINGS,
    B,
    CoreBench,
    D,
    P,
    cancelled,
    emitted,
    finished,
    hybrid,
    joined,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
    Poison,
    Role,
    WorkerId,
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.commands import Command, StartRow
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings

COUNTS = (12, 6)


def chunks(commands: list[Command], worker: WorkerId) -> list[tuple[int, int]]:
    return [
        (op.row, op.until)
        for op in plan_of(commands, worker).operations
        if isinstance(op, Chunk)
    ]


def started(commands: list[Command], worker: WorkerId) -> list[str]:
    return [
        op.request_id for op in plan_of(commands, worker).operations if isinstance(op, StartRow)
    ]


def waits(bench: CoreBench, name: str) -> list[tuple[object, ...]]:
    """What the request was recorded to wait for, of what pool and where, and pages short."""
    return [
        tuple(map(record.fields.get, ("reason", "pool", "worker", "pages_short")))
        for record in bench.records
        if record.event is LogEvent.REQUEST_WAITS and record.request_id == name
    ]


# --- Chunks ---


def test_prompts_share_the_chunk_budget_in_the_order_of_their_rank() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY))
    commands = bench.turn(submitted("a", 3, 4), submitted("b", 3, 4), submitted("c", 9, 4))
    assert chunks(commands, B) == [(0, 3), (1, 3), (2, 2)]
    commands = bench.turn(report(B, 1, chunks={0: 3, 1: 3, 2: 2}, tokens={0: 1, 1: 1}))
    assert chunks(commands, B) == [(2, 9)]


def test_the_next_chunks_are_given_out_when_all_of_the_last_ones_are_answered() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY))
    bench.turn(submitted("a", 4, 4), submitted("b", 20, 4))
    assert bench.turn(report(B, 1, chunks={0: 4}, tokens={0: 1})) != []
    assert len(bench.worker(B).turns) == 1
    commands = bench.turn(report(B, 1, chunks={1: 4}))
    assert chunks(commands, B) == [(1, 12)]


def test_a_prompt_of_higher_priority_goes_first_whenever_it_came() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY))
    bench.turn(submitted("low", 30, 4))
    bench.turn(submitted("high", 30, 4, priority=1))
    commands = bench.turn(report(B, 1, chunks={0: 8}))
    assert chunks(commands, B) == [(1, 8)]


def test_without_a_budget_every_prompt_runs_as_far_as_its_pages_reach() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (50,), FULL_ONLY), settings=CoreSettings(chunk_tokens=None)
    )
    commands = bench.turn(submitted("a", 30, 4), submitted("b", 20, 4))
    assert chunks(commands, B) == [(0, 30), (1, 20)]


# --- The queue ---


def test_requests_are_admitted_in_the_order_of_rank_and_of_arrival_within_a_rank() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=1))
    bench.turn(submitted("runs", 4, 1))
    bench.turn(
        submitted("low", 4, 1, priority=-1),
        submitted("first", 4, 1),
        submitted("second", 4, 1),
        submitted("high", 4, 1, priority=2),
    )
    order: list[str] = []
    for _ in range(4):
        seq = bench.worker(B).seq
        done = report(B, seq, chunks={0: 4}, tokens={0: 1}, ended={0: EndReason.LENGTH})
        bench.turn(done)
        order += started(bench.turn(report(B, seq + 1)), B)
    assert order == ["high", "first", "second", "low"]


def test_a_prompt_is_admitted_only_with_pages_for_all_of_it_and_nobody_overtakes() -> None:
    settings = replace(SETTINGS, bypass_count_max=0)  # Else "small" would; see `bypass`.
    bench = CoreBench(joined(B, Role.BOTH, (10,), FULL_ONLY), settings=settings)
    bench.turn(submitted("runs", 20, 5))
    bench.turn(submitted("large", 20, 5), submitted("small", 4, 1))
    assert bench.phase("large") is Phase.WAITING and bench.phase("small") is Phase.WAITING
    # Six pages for 21 positions, and one for the row that runs, should it grow: four are there.
    assert waits(bench, "large") == [("pages", "full", "b", 3)]
    bench.turn(cancelled("runs"))
    commands = bench.turn(report(B, bench.worker(B).seq))
    assert started(commands, B) == ["large", "small"]


def test_what_a_request_waits_for_is_recorded_once_and_again_when_it_changes() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (10,), FULL_ONLY, rows=2))
    bench.turn(submitted("a", 20, 5), submitted("b", 4, 1))
    bench.turn(submitted("r", 20, 5))
    for _ in range(3):
        bench.turn()
    assert waits(bench, "r") == [("row", None, "b", None)]
    bench.turn(cancelled("b"))
    bench.turn(report(B, bench.worker(B).seq))
    assert waits(bench, "r")[1:] == [("pages", "full", "b", 3)]


def test_pages_beyond_the_reserve_are_taken_only_if_nobody_was_promised_them() -> None:
    settings = CoreSettings(chunk_tokens=None)
    bench = CoreBench(joined(B, Role.BOTH, (50, 7)), settings=settings)
    commands = bench.turn(submitted("a", 40, 2), submitted("b", 40, 2))
    # Both floors of 3 are promised; one page is left, and the first in rank takes it.
    assert chunks(commands, B) == [(0, 16), (1, 12)]


def test_a_page_out_of_the_window_is_given_back_before_the_next_admission_is_tried() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50, 5), hybrid(window=5)))
    bench.decode_whole("runs", 8, 30)
    bench.turn(report(B, bench.worker(B).seq, tokens={0: 3}))
    # Queries 11 to 15 read from 7 on: three pages, of which the row was promised two.
    assert bench.free(B)[1] == 2
    bench.turn(submitted("x", 4, 1), submitted("r", 8, 2))
    assert bench.phase("x") is Phase.PREFILLING
    assert waits(bench, "r") == [("pages", "window", "b", 1)]
    # Query 12 reads from 8 on.
    bench.turn(report(B, bench.worker(B).seq, tokens={0: 1}))
    assert bench.phase("r") is Phase.PREFILLING


def test_requests_go_to_the_worker_with_the_most_room_for_them() -> None:
    b2 = WorkerId("b2")
    bench = CoreBench(
        joined(B, Role.BOTH, (8,), FULL_ONLY), joined(b2, Role.BOTH, (9,), FULL_ONLY)
    )
    commands = bench.turn(
        submitted("a", 8, 1), submitted("b", 8, 1), submitted("c", 8, 1), submitted("d", 20, 1)
    )
    assert started(commands, b2) == ["a", "c"]
    assert started(commands, B) == ["b", "d"]


# --- Hand-off ---


def test_finished_prompts_get_their_decode_worker_in_the_order_of_rank() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY), joined(D, Role.DECODE, (10,), FULL_ONLY)
    )
    bench.hand_over("runs", 28, 4)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("low", 16, 8)
    bench.prefill("high", 16, 10)
    # Five pages for 17 positions, and one for the row that runs, should it grow: two are there.
    assert waits(bench, "low") == [("pages", "full", "d", 4)]
    bench.turn(submitted("highest", 16, 10, priority=1))
    row = bench.row_of("highest")
    bench.turn(report(P, bench.worker(P).seq, chunks={row: 8}))
    done = report(
        P,
        bench.worker(P).seq,
        chunks={row: 16},
        tokens={row: 1},
        ended={row: EndReason.LENGTH},
    )
    bench.turn(done)
    bench.turn(cancelled("runs"))
    commands = bench.turn(report(D, bench.worker(D).seq))
    pulls = [op for op in plan_of(commands, D).operations if isinstance(op, Fetch)]
    assert [pull.request_id for pull in pulls] == ["highest"]
    # What it was promised and had not taken is there for the next one at once.
    commands = bench.turn(cancelled("highest"))
    pulls = [op for op in plan_of(commands, D).operations if isinstance(op, Fetch)]
    assert [pull.request_id for pull in pulls] == ["low"]


def test_prompts_wait_in_the_queue_while_too_many_finished_ones_wait_for_a_decode_worker() -> (
    None
):
    settings = CoreSettings(handoff_waiting_count_max=1)
    bench = CoreBench(
        joined(P, Role.PREFILL, (50,), FULL_ONLY),
        joined(D, Role.DECODE, (8,), FULL_ONLY),
        settings=settings,
    )
    bench.hand_over("runs", 20, 10)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("waits", 8, 10)
    bench.turn(submitted("r", 8, 10), submitted("one", 8, 1))
    assert bench.phase("r") is Phase.WAITING
    assert waits(bench, "r") == [("destination", None, None, None)]
    last = report(D, bench.worker(D).seq, tokens={0: 9}, ended={0: EndReason.LENGTH})
    bench.turn(last)
    bench.turn(report(D, bench.worker(D).seq))
    assert bench.worker(D).tickets and bench.phase("r") is Phase.PREFILLING


def test_a_pull_that_fails_ends_its_request_and_all_pages_drain() -> None:
    bench = CoreBench(joined(P, Role.PREFILL, COUNTS), joined(D, Role.DECODE, COUNTS))
    bench.prefill("r", 8, 4)
    commands = bench.turn(report(D, 2, fetched={1: "no such process"}))
    answer = finished(commands)["r"]
    assert (answer.reason, answer.status) == (EndReason.ERROR, 500)
    assert answer.text == "the hand-off to worker d failed: no such process"
    assert bench.draining(P) == [2, 2] and bench.draining(D) == [2, 2]
    bench.turn(report(P, bench.worker(P).seq), report(D, bench.worker(D).seq))
    assert bench.free(P) == list(COUNTS) and bench.free(D) == list(COUNTS)


# --- Guards ---


def test_a_head_that_is_stuck_on_an_idle_fleet_is_ended_with_an_account_of_the_pools() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS))
    books = bench.worker(B).books
    leak = books.open([Pages(12), Pages(0)], [Tokens(0), Tokens(0)], keeps_windows=False)
    assert leak is not None
    books.cover(leak, 0, Tokens(48), surplus=False)
    commands = bench.turn(submitted("r", 8, 4), submitted("s", 8, 4))
    assert sorted(finished(commands)) == ["r", "s"]
    answer = finished(commands)["r"]
    assert (answer.reason, answer.status) == (EndReason.ERROR, 500)
    (record, _) = [r for r in bench.records if r.event is LogEvent.INTERNAL_ERROR]
    assert record.fields["pools"] == "b: [0, 6] free of [12, 6]"


def test_pages_that_are_free_again_are_poisoned_before_their_next_use() -> None:
    settings = CoreSettings(chunk_tokens=Tokens(8), poison_freed_pages=True)
    bench = CoreBench(joined(B, Role.BOTH, COUNTS), settings=settings)
    bench.turn(submitted("r", 20, 1))
    # Query 8 reads from 3 on, so page 0 stays; query 16 from 11, and two pages are free.
    bench.turn(report(B, 1, chunks={0: 8}))
    (first, *_) = plan_of(bench.turn(report(B, 2, chunks={0: 16})), B).operations
    assert first == Poison(1, pack_ids([0, 1]))
    last = report(B, 3, chunks={0: 20}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    bench.turn(last)
    operations = plan_of(bench.turn(report(B, 4)), B).operations
    poisoned = {op.group: unpack_ids(op.ids) for op in operations if isinstance(op, Poison)}
    assert poisoned[0] == (0, 1, 2, 3, 4)
    assert HYBRID.groups[1].span(Tokens(15), Tokens(20)) == len(poisoned[1])


def test_no_plan_is_sent_when_there_is_nothing_to_say() -> None:
    bench = CoreBench(joined(P, Role.PREFILL, COUNTS), joined(D, Role.DECODE, COUNTS))
    assert bench.turn() == []
    bench.hand_over("r", 8, 9)
    assert bench.turn() == []
    bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    # Within the pages that the row has, tokens are no reason for a plan.
    assert bench.turn(report(D, bench.worker(D).seq, tokens={0: 1})) == [emitted(2)]
