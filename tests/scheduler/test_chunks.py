"""Chunks: several turns in flight, prompts that share their budget, and rows that decode."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    cancelled,
    finished,
    hybrid,
    joined,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.protocol import Chunk, EndReason, Role, Row
from tidegate.kvcache.layout import Layout, Tokens
from tidegate.scheduler.commands import Command, SendPlan
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings


def bench_of(
    *page_counts: int,
    layout: Layout = FULL_ONLY,
    chunk: int | None = 8,
    mixed: int | None = None,
    in_flight: int = 2,
) -> CoreBench:
    """One worker that runs everything, with pages of 4 tokens."""
    settings = CoreSettings(
        chunk_tokens=None if chunk is None else Tokens(chunk),
        mixed_chunk_tokens=None if mixed is None else Tokens(mixed),
        chunks_in_flight=in_flight,
        prefix_cache=False,
    )
    return CoreBench(joined(B, Role.BOTH, page_counts, layout, rows=8), settings=settings)


def chunks(commands: list[Command]) -> list[tuple[int, int, int]]:
    """Row, end and turn of each chunk that is given out."""
    plans = [command for command in commands if isinstance(command, SendPlan)]
    operations = [operation for plan in plans for operation in plan.operations]
    return [(op.row, op.until, op.turn) for op in operations if isinstance(op, Chunk)]


def test_the_next_chunk_is_with_the_worker_before_the_last_one_is_answered() -> None:
    bench = bench_of(50)
    assert chunks(bench.turn(submitted("r", 30, 4))) == [(0, 8, 0), (0, 16, 1)]
    assert chunks(bench.turn(report(B, 1, chunks={0: 8}))) == [(0, 24, 2)]
    commands = bench.turn(report(B, 2, chunks={0: 16}))
    assert plan_of(commands, B).operations[-1] == Chunk(Row(0), 30, sample=True, turn=3)
    assert chunks(bench.turn(report(B, 3, chunks={0: 24}))) == []
    bench.turn(report(B, 3, chunks={0: 30}, tokens={0: 1}))
    assert bench.phase("r") is Phase.DECODING and len(bench.worker(B).turns) == 0


@pytest.mark.parametrize("in_flight", [1, 3])
def test_as_many_turns_are_with_the_worker_as_the_setting_says(in_flight: int) -> None:
    bench = bench_of(50, in_flight=in_flight)
    given = [(0, 8 * (turn + 1), turn) for turn in range(in_flight)]
    assert chunks(bench.turn(submitted("r", 60, 4))) == given


def test_prompts_share_each_turn_and_the_next_one_begins_where_the_last_ended() -> None:
    bench = bench_of(50)
    commands = bench.turn(submitted("a", 5, 4), submitted("b", 20, 4))
    assert chunks(commands) == [(0, 5, 0), (1, 3, 0), (1, 11, 1)]
    # A turn is over when all of its chunks are answered.
    assert chunks(bench.turn(report(B, 1, chunks={0: 5}, tokens={0: 1}))) == []
    assert chunks(bench.turn(report(B, 1, chunks={1: 3}))) == [(1, 19, 2)]


def test_a_prompt_waits_for_the_answer_if_there_are_not_pages_for_two_chunks() -> None:
    # Of the window of 5 a row is promised three pages, and there are four.
    bench = bench_of(20, 4, layout=hybrid(window=5))
    commands = bench.turn(submitted("r", 24, 4))
    assert chunks(commands) == [(0, 8, 0), (0, 16, 1)]
    # Query 8 reads from 4 on: one page has come back, and two are needed for the next chunk.
    commands = bench.turn(report(B, 1, chunks={0: 8}))
    assert chunks(commands) == []
    seq = bench.worker(B).seq
    assert chunks(bench.turn(report(B, seq, chunks={0: 16}))) == [(0, 24, 0)]


def test_nobody_takes_pages_ahead_for_a_chunk_that_others_wait_for() -> None:
    bench = bench_of(40, 7, layout=hybrid(window=5))
    bench.turn(submitted("a", 40, 4))
    bench.turn(report(B, 1, chunks={0: 8}))
    assert len(bench.worker(B).turns) == 2
    bench.turn(submitted("b", 120, 4))  # It waits for pages of the full pool.
    assert bench.phase("b") is Phase.WAITING
    assert chunks(bench.turn(report(B, bench.worker(B).seq, chunks={0: 16}))) == []
    given = chunks(bench.turn(report(B, bench.worker(B).seq, chunks={0: 24})))
    assert [until for _, until, _ in given] == [32]


def test_while_rows_decode_their_launches_have_less_of_prompts() -> None:
    bench = bench_of(50, mixed=3)
    assert chunks(bench.turn(submitted("r", 8, 30))) == [(0, 8, 0)]
    bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}))
    commands = bench.turn(submitted("long", 30, 4))
    assert chunks(commands) == [(1, 3, 0), (1, 6, 1)]
    # Alone it goes on with the whole budget.
    seq = bench.worker(B).seq
    ended = {0: EndReason.END_TOKEN}
    assert finished(bench.turn(report(B, seq, tokens={0: 1}, ended=ended)))
    assert chunks(bench.turn(report(B, seq, chunks={1: 3}))) == [(1, 14, 2)]


def test_the_lower_budget_counts_where_rows_decode() -> None:
    bench = bench_of(50, chunk=2, mixed=3)
    bench.turn(submitted("r", 2, 30))
    bench.turn(report(B, 1, chunks={0: 2}, tokens={0: 1}))
    assert chunks(bench.turn(submitted("long", 30, 4))) == [(1, 2, 0), (1, 4, 1)]


def test_chunks_without_any_budget_are_bounded_while_rows_decode() -> None:
    bench = bench_of(50, chunk=None, mixed=6)
    bench.turn(submitted("r", 8, 30))
    bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}))
    assert chunks(bench.turn(submitted("long", 30, 4))) == [(1, 6, 0), (1, 12, 1)]


def test_both_turns_of_a_prompt_that_is_cancelled_are_over() -> None:
    bench = bench_of(50)
    bench.turn(submitted("r", 30, 4))
    bench.turn(cancelled("r"))
    assert len(bench.worker(B).turns) == 0
    # What was under way is answered all the same, or not: the row is gone.
    commands = bench.turn(report(B, 1, chunks={0: 8}), submitted("next", 10, 1))
    assert chunks(commands) == [(1, 8, 0), (1, 10, 1)]
    assert bench.core.fleet.stale_count == 1
