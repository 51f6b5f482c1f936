"""Prompts that begin alike, from the core's side: where rows start, and what is counted."""

from collections.abc import Sequence

import pytest

from fakes.core_bench import (
    HYBRID,
    SETTINGS,
    B,
    CoreBench,
    D,
    P,
    finished,
    hybrid,
    joined,
    lost,
    plan_of,
    report,
    run,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Chunk, EndReason, RequestId, Role, WorkerId
from tidegate.kvcache.layout import Layout, Tokens
from tidegate.kvcache.unit_hashes import unit_hashes
from tidegate.scheduler.commands import Command, StartRow
from tidegate.scheduler.core import Core
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.status import status_of

COUNTS = (16, 8)
UNIT = Tokens(4)
FLAG_FALSE = hybrid(flag=False)


def hashes(prompt: int, alike: int = 1000, tail: int = 7) -> tuple[bytes, ...]:
    """Of a prompt whose first `alike` tokens are those of all prompts here."""
    tokens = [1 if position < alike else tail for position in range(prompt)]
    return unit_hashes(b"".join(t.to_bytes(4, "little") for t in tokens), UNIT, b"")


def pair(layout: Layout = HYBRID, settings: CoreSettings = SETTINGS) -> CoreBench:
    return CoreBench(
        joined(P, Role.PREFILL, COUNTS, layout),
        joined(D, Role.DECODE, COUNTS, layout),
        settings=settings,
    )


def run_alone(bench: CoreBench, name: str, chain: Sequence[bytes], prompt: int) -> None:
    """Run a request with one token to sample to its end, and let its pages drain."""
    commands = bench.turn(submitted(name, prompt, 1, hashes=chain))
    worker = next(iter(bench.core.fleet.requests[RequestId(name)].workers.values()))
    while not finished(commands):
        seat = bench.core.fleet.requests[RequestId(name)].source
        assert seat is not None and seat.chunk_until is not None
        row, until = seat.row, seat.chunk_until
        is_last = until == prompt
        commands = bench.turn(
            report(
                worker,
                bench.worker(worker).seq,
                chunks={row: until},
                tokens={row: 1} if is_last else None,
                ended={row: EndReason.LENGTH} if is_last else None,
            )
        )
    assert finished(commands)[name].reason is EndReason.LENGTH
    bench.turn(report(worker, bench.worker(worker).seq))


def start_of(commands: Sequence[Command], worker: WorkerId) -> StartRow:
    (start,) = [op for op in plan_of(commands, worker).operations if isinstance(op, StartRow)]
    return start


def chunk_ends(commands: Sequence[Command], worker: WorkerId) -> list[int]:
    return [op.until for op in plan_of(commands, worker).operations if isinstance(op, Chunk)]


def test_a_row_starts_after_what_is_cached_with_the_pages_that_it_needs_of_it() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(18), 18)
    commands = bench.turn(submitted("second", 20, 4, hashes=hashes(20)))
    start = start_of(commands, P)
    # 16 of the first prompt's 18 tokens are full units; the window before 16 begins at 11.
    assert start.position == 16
    assert start.pages[0] == run(0, 0, 1, 2, 3, 4)  # The last one is its own.
    assert start.pages[1].first_position == 8 and len(start.pages[1].ids) == 2 * 4
    assert chunk_ends(commands, P) == [20]


def test_the_last_token_of_a_prompt_is_fed_though_all_of_it_is_cached() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(18), 18)
    commands = bench.turn(submitted("same", 16, 4, hashes=hashes(16)))
    assert start_of(commands, P).position == 12
    assert chunk_ends(commands, P) == [16]


def test_prompts_that_part_share_what_comes_before() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(20, alike=12, tail=7), 20)
    commands = bench.turn(submitted("other", 20, 4, hashes=hashes(20, alike=12, tail=8)))
    # Both windows at 12 and at 8 are still there, as nothing else needed their pages.
    assert start_of(commands, P).position == 12


def test_chunks_are_found_by_others_while_the_prompt_still_runs() -> None:
    bench = pair()
    bench.turn(submitted("first", 18, 4, hashes=hashes(18)))
    bench.turn(report(P, bench.worker(P).seq, chunks={0: 8}))
    commands = bench.turn(submitted("second", 18, 4, hashes=hashes(18)))
    assert start_of(commands, P).position == 8


def test_what_was_cached_is_told_at_admission_and_at_the_end() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(18), 18)
    run_alone(bench, "second", hashes(18), 18)
    told = {
        (record.event, record.request_id): record.fields["cached_tokens"]
        for record in bench.records
        if "cached_tokens" in record.fields
    }
    assert told == {
        (LogEvent.REQUEST_ADMITTED, "first"): 0,
        (LogEvent.REQUEST_FINISHED, "first"): 0,
        (LogEvent.REQUEST_ADMITTED, "second"): 16,
        (LogEvent.REQUEST_FINISHED, "second"): 16,
    }


def test_the_status_tells_cached_pages_apart_and_how_often_prompts_were_found() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(18), 18)
    run_alone(bench, "second", hashes(18), 18)
    status = status_of(bench.core, None, "epoch")
    pools = {(p.worker, p.pool): (p.free_count, p.cached_count) for p in status.pools}
    assert pools[P, "full"] == (16, 4) and pools[D, "full"] == (16, 0)
    (cache,) = status.caches
    assert (cache.worker, cache.lookup_count, cache.hit_count) == (P, 2, 1)
    assert (cache.prompt_tokens, cache.hit_tokens) == (36, 16)


def test_cached_pages_give_way_to_a_prompt_that_needs_the_whole_pool() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(18), 18)
    assert bench.worker(P).books.pools[0].free_count < 16
    run_alone(bench, "large", hashes(64, alike=0), 64)
    run_alone(bench, "again", hashes(18), 18)
    assert bench.records[-1].fields["cached_tokens"] == 0


def test_a_prompt_goes_where_the_fewest_positions_are_left_to_run() -> None:
    other = WorkerId("p2")
    bench = CoreBench(
        joined(P, Role.PREFILL, COUNTS),
        joined(other, Role.PREFILL, (99, 99)),
        joined(D, Role.DECODE, COUNTS),
    )
    run_alone(bench, "first", hashes(18), 18)  # On the roomier of the two.
    bench.turn(submitted("stranger", 30, 4, hashes=hashes(30, alike=0)))
    assert bench.core.fleet.requests[RequestId("stranger")].workers["prefill"] == other
    # The idle worker would begin with all 18 of it, the other with 30 first.
    bench.turn(submitted("second", 18, 4, hashes=hashes(18)))
    assert bench.core.fleet.requests[RequestId("second")].workers["prefill"] == P
    # Now 18 against 30 come before it, but of its own 16 are cached on the busier one.
    bench.turn(submitted("third", 40, 4, hashes=hashes(40)))
    assert bench.core.fleet.requests[RequestId("third")].workers["prefill"] == other


def test_a_worker_that_comes_back_has_nothing_cached() -> None:
    bench = pair()
    run_alone(bench, "first", hashes(18), 18)
    bench.turn(lost(P), joined(P, Role.PREFILL, COUNTS, incarnation=2))
    bench.turn(report(P, bench.worker(P).seq))
    commands = bench.turn(submitted("second", 18, 4, hashes=hashes(18)))
    assert start_of(commands, P).position == 0


def test_without_the_setting_nothing_is_cached() -> None:
    settings = CoreSettings(chunk_tokens=Tokens(8), prefix_cache=False)
    bench = pair(settings=settings)
    run_alone(bench, "first", hashes(18), 18)
    assert [pool.free_count for pool in bench.worker(P).books.pools] == list(COUNTS)
    commands = bench.turn(submitted("second", 18, 4, hashes=hashes(18)))
    assert start_of(commands, P).position == 0


def test_a_hit_whose_windows_all_move_has_all_of_them() -> None:
    bench = pair(FLAG_FALSE)
    bench.turn(submitted("first", 18, 4, hashes=hashes(18)))
    for until in (8, 16):
        bench.turn(report(P, bench.worker(P).seq, chunks={0: until}))
    commands = bench.turn(submitted("second", 18, 4, hashes=hashes(18)))
    start = start_of(commands, P)
    assert start.position == 16
    assert [pages.first_position for pages in start.pages] == [0, 0]
    assert len(start.pages[1].ids) == 4 * 4


def test_a_request_without_hand_off_is_not_cached_where_whole_windows_are() -> None:
    bench = pair(FLAG_FALSE)
    run_alone(bench, "first", hashes(18), 18)
    commands = bench.turn(submitted("second", 18, 4, hashes=hashes(18)))
    assert start_of(commands, P).position == 0


@pytest.mark.parametrize("output", [2, 5])
def test_a_request_that_begins_anew_finds_its_prompt_and_feeds_its_tokens_again(
    output: int,
) -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS), joined(WorkerId("b2"), Role.BOTH, COUNTS))
    core: Core = bench.core
    run_alone(bench, "first", hashes(18), 18)
    bench.turn(submitted("second", 16, 9, hashes=hashes(16)))
    seat = core.fleet.requests[RequestId("second")].source
    assert seat is not None and seat.settled == 12
    name, row = seat.worker.worker_id, seat.row
    bench.turn(report(name, seat.worker.seq, chunks={row: 16}, tokens={row: 1}))
    bench.turn(report(name, seat.worker.seq, tokens={row: output - 1}))
    request = core.fleet.requests[RequestId("second")]
    core.fleet.requeue(request, 0)
    commands = bench.turn()
    assert request.phase is Phase.PREFILLING
    start = start_of(commands, name)
    # Never so much that a single token were left to feed, as if the row decoded already.
    assert start.position == 12 and start.output_index == output
    assert request.cached_tokens == 12
