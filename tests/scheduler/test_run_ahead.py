"""How far rows run ahead, and how what they hold ahead goes to those who need it now."""

from collections.abc import Mapping

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    cancelled,
    emitted,
    finished,
    grow,
    hybrid,
    joined,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Grow, RequestId, Role, Row, Stop, Trim, unpack_ids
from tidegate.kvcache.layout import Layout, Tokens
from tidegate.scheduler.commands import Command, SendPlan
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.surplus import surplus

AHEAD, AHEAD_MAX = Tokens(8), Tokens(32)
LEAST = 2  # A quarter of what rows run ahead else.


def bench_of(
    page_count: int, *, ahead_max: Tokens = AHEAD_MAX, layout: Layout = FULL_ONLY
) -> CoreBench:
    """One worker that runs everything, with pages of 4 tokens."""
    settings = CoreSettings(
        chunk_tokens=None, ahead_tokens=AHEAD, ahead_tokens_max=ahead_max, prefix_cache=False
    )
    counts = tuple(page_count for _ in layout.groups)
    return CoreBench(joined(B, Role.BOTH, counts, layout, rows=8), settings=settings)


def bring(
    bench: CoreBench,
    tokens: Mapping[int, int],
    trimmed: Mapping[int, tuple[int, ...]] | None = None,
) -> list[Command]:
    """The worker has carried out all plans; rows bring so many tokens each."""
    return bench.turn(report(B, bench.worker(B).seq, tokens=tokens, trimmed=trimmed))


def lead(bench: CoreBench, row: int = 0) -> int:
    """How many positions beyond the settled one the row's pages cover."""
    seat = bench.worker(B).seats[Row(row)]
    return seat.holding.covered - seat.settled


def pages_granted(commands: list[Command]) -> dict[int, int]:
    """For each row how many pages of the full pool it got."""
    plans = [command for command in commands if isinstance(command, SendPlan)]
    return {
        operation.row: len(unpack_ids(operation.ids))
        for plan in plans
        for operation in plan.operations
        if isinstance(operation, Grow) and operation.group == 0
    }


def trims(commands: list[Command]) -> list[tuple[int, int]]:
    plans = [command for command in commands if isinstance(command, SendPlan)]
    operations = [operation for plan in plans for operation in plan.operations]
    return [(op.row, op.until) for op in operations if isinstance(op, Trim)]


def test_the_longer_a_row_has_run_the_further_it_may_run_ahead_up_to_a_bound() -> None:
    bench = bench_of(200)
    bench.decode_whole("a", 8, 300)
    bring(bench, {0: 1})
    leads: list[int] = []
    for _ in range(100):
        bring(bench, {0: 1})
        leads.append(lead(bench))
    assert max(leads[:8]) <= AHEAD + 4 and AHEAD_MAX - 4 < max(leads) <= AHEAD_MAX + 3
    # It takes more when it has half of it left: never as few as at the beginning, then.
    assert min(leads[60:]) > AHEAD and max(leads[-40:]) == max(leads)


def test_a_row_with_plenty_of_pages_needs_a_look_only_now_and_then() -> None:
    bench = bench_of(200, layout=hybrid(window=6))
    bench.decode_whole("a", 8, 300)
    plan_count = 0
    for _ in range(160):
        plan_count += any(isinstance(command, SendPlan) for command in bring(bench, {0: 1}))
    # Every sixteen tokens or so, and not at each edge of a page.
    assert plan_count <= 16


def test_no_row_leads_by_more_than_an_equal_share_of_what_is_available() -> None:
    longest: dict[int, int] = {}
    for page_count in (36, 42, 200):
        bench = bench_of(page_count)
        bench.decode_whole("a", 8, 100)
        bench.decode_whole("b", 8, 100)
        leads: list[int] = []
        for _ in range(52):
            bring(bench, {0: 1, 1: 1})
            leads += [lead(bench, 0), lead(bench, 1)]
        longest[page_count] = max(leads[-40:])
    # In the end thirty pages hold what is settled. Each row may have half of the others.
    assert longest[36] < longest[42] < longest[200]
    assert longest[36] <= (36 - 24) * 4 / 2 and longest[200] > AHEAD_MAX - 4


def short_of_pages() -> CoreBench:
    """Row 0, "low", has pages for 12 positions and has fed 4. Row 1, "high", has one left of
    16, and no page is free."""
    bench = bench_of(7)
    bench.decode_whole("low", 4, 24)
    bench.turn(submitted("high", 4, 24, priority=1))
    bench.turn(report(B, bench.worker(B).seq, chunks={1: 4}, tokens={1: 1}))
    for count in (3, 4, 4):
        bring(bench, {1: count})
    assert bench.free(B) == [0] and (lead(bench, 0), lead(bench, 1)) == (8, 1)
    return bench


def test_rows_that_are_short_take_pages_as_soon_as_there_are_some() -> None:
    bench = short_of_pages()
    assert list(bench.worker(B).short) == [1]
    assert bring(bench, {0: 1}) == [emitted(1)]
    bench.turn(cancelled("low"))
    # It has brought nothing since, and did not ask anew.
    assert pages_granted(bench.turn(report(B, bench.worker(B).seq))) == {1: 3}
    assert not bench.worker(B).short


def test_pages_held_ahead_are_asked_back_before_anybody_gives_way() -> None:
    bench = short_of_pages()
    commands = bring(bench, {1: 1})
    assert plan_of(commands, B).operations == (Trim(Row(0), 5),)
    # It goes on while it is asked, and takes no page until it has answered.
    assert bring(bench, {0: 2}) == [emitted(1)]
    assert bench.free(B) == [0] and waits_for(bench, "high") == "pages both full"
    commands = bring(bench, {0: 1}, trimmed={0: (1,)})
    assert plan_of(commands, B).operations == (grow(1, 0, 2),)
    assert preempted(bench) == [] and bench.free(B) == [0] and waits_for(bench, "high") == ""


def test_a_row_that_has_used_its_pages_meanwhile_gives_back_none_and_then_gives_way() -> None:
    bench = short_of_pages()
    bring(bench, {1: 1})
    # Its worker had fed position 8 when it was asked, and the tokens up to there are to come.
    commands = bring(bench, {}, trimmed={0: (0,)})
    assert trims(commands) == [] and preempted(bench) == ["low"]
    assert plan_of(commands, B).operations[0] == Stop(Row(0))


def test_pages_that_a_row_takes_after_it_was_asked_can_be_asked_back_again() -> None:
    bench = short_of_pages()
    bring(bench, {1: 1})
    bring(bench, {}, trimmed={0: (1,)})
    bench.turn(cancelled("high"))
    bring(bench, {})
    bring(bench, {0: 4})
    seat = bench.worker(B).seats[Row(0)]
    assert lead(bench) > 4 and surplus(seat, 0, Tokens(1)) > 0


def test_whoever_waits_for_pages_gets_those_that_rows_hold_ahead_beyond_the_least() -> None:
    bench = bench_of(30)
    bench.decode_whole("a", 8, 60)
    for _ in range(24):
        bring(bench, {0: 1})
    assert lead(bench) == 24 and bench.free(B) == [16]
    # It needs 18 pages, and one more for the row that grows.
    commands = bench.turn(submitted("w", 68, 8))
    assert trims(commands) == [(0, 32 + LEAST)]
    assert bench.turn() == []  # It is not asked twice.
    commands = bring(bench, {0: 1}, trimmed={0: (5,)})
    assert bench.phase("w") is Phase.PREFILLING and lead(bench) == 3


def test_a_row_takes_no_page_before_it_has_said_what_it_gives_back() -> None:
    bench = bench_of(30)
    bench.decode_whole("a", 8, 60)
    bench.decode_whole("c", 8, 60)
    for _ in range(24):
        bring(bench, {0: 1})
    bench.turn(cancelled("c"))
    before = bench.worker(B).seq
    commands = bench.turn(submitted("w", 60, 8))
    assert [row for row, _ in trims(commands)] == [0] and bench.draining(B) != [0]
    # Pages come back, and it has one position left of those that it had.
    free, covered = bench.free(B)[0], bench.worker(B).seats[Row(0)].holding.covered
    commands = bench.turn(report(B, before, tokens={0: covered - 33}))
    assert lead(bench) == 1 and bench.free(B)[0] > free and pages_granted(commands) == {}
    commands = bring(bench, {}, trimmed={0: (0,)})
    assert pages_granted(commands) == {0: 1} and bench.phase("w") is Phase.WAITING


def test_nothing_is_asked_back_if_it_would_not_be_enough() -> None:
    bench = bench_of(30)
    bench.decode_whole("a", 8, 60)
    for _ in range(24):
        bring(bench, {0: 1})
    commands = bench.turn(submitted("w", 96, 8))  # 25 pages and one, of 16 and 5.
    assert trims(commands) == [] and waits_for(bench, "w") == "pages both full"
    # But the row takes little from now on.
    for _ in range(24 - LEAST):
        assert pages_granted(bring(bench, {0: 1})) == {}
    assert pages_granted(bring(bench, {0: 1})) == {0: 1}


def test_pages_of_a_window_that_were_left_to_rows_are_free_as_soon_as_somebody_waits() -> None:
    bench = bench_of(60, layout=hybrid(window=6))
    bench.decode_whole("a", 8, 200)
    table = bench.worker(B).seats[Row(0)].holding.tables[1]
    settled = 8
    while settled - 5 - table.first_position < 8:
        settled += 1
        bring(bench, {0: 1})
    first, free = table.first_page, bench.free(B)[1]
    bench.turn(submitted("w", 200, 8))
    assert waits_for(bench, "w") == "pages both full"
    assert table.first_page >= first + 2 and bench.free(B)[1] >= free + 2


@pytest.mark.parametrize("counts", [(2,), (-1,), (1, 1), ()])
def test_an_answer_that_cannot_be_ends_the_request(counts: tuple[int, ...]) -> None:
    bench = short_of_pages()
    bring(bench, {1: 1})
    answer = finished(bring(bench, {}, trimmed={0: counts}))["low"]
    assert answer.status == 500 and "that it gave back" in answer.text
    bring(bench, {})
    assert bench.phase("high") is Phase.DECODING


def test_an_answer_of_a_row_that_was_not_asked_ends_its_request() -> None:
    bench = short_of_pages()
    answer = finished(bring(bench, {}, trimmed={0: (1,)}))["low"]
    assert answer.status == 500


def test_an_answer_of_a_row_that_is_gone_is_dropped() -> None:
    bench = short_of_pages()
    bring(bench, {1: 1})
    bench.turn(cancelled("low"))
    seq = bench.worker(B).seq
    assert bench.turn(report(B, seq - 1, trimmed={0: (1,)})) == []
    assert bench.core.fleet.stale_count == 1 and bench.draining(B) == [3]
    commands = bench.turn(report(B, seq))
    assert pages_granted(commands) == {1: 3}


def preempted(bench: CoreBench) -> list[str | None]:
    records = [r for r in bench.records if r.event is LogEvent.REQUEST_PREEMPTED]
    return [record.request_id for record in records]


def waits_for(bench: CoreBench, name: str) -> str:
    return bench.core.fleet.requests[RequestId(name)].waits_for
