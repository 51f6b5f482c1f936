"""Early destinations: pages move while the prompt runs, and nobody waits for that."""

from collections.abc import Mapping

import msgspec
import pytest

from fakes.core_bench import (
    FULL_ONLY,
    HYBRID,
    SETTINGS,
    STALL_US,
    CoreBench,
    D,
    P,
    cancelled,
    emitted,
    finished,
    grow,
    hybrid,
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
    Incarnation,
    PlanSeq,
    PoolId,
    PullGroup,
    RequestId,
    Role,
    Row,
    Ticket,
    Trim,
    WorkerId,
    pack_ids,
)
from tidegate.kvcache.layout import Layout
from tidegate.scheduler import early
from tidegate.scheduler.commands import Command, SendPlan, StartRow
from tidegate.scheduler.losses import patience_ends_us
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Request

R, ROW = RequestId("r"), Row(0)
P2, D2 = WorkerId("p2"), WorkerId("d2")
EARLY = msgspec.structs.replace(SETTINGS, early_handoff=True)
NOTHING = PullGroup(0, b"", b"")


def bench_of(
    decode_pages: tuple[int, ...] = (16, 8),
    layout: Layout = HYBRID,
    *,
    rows: int = 4,
    more: Mapping[WorkerId, Role] = {},
    is_on: bool = True,
) -> CoreBench:
    """P has room for anything. Chunks are of 8 tokens, pages of 4."""
    roomy = tuple(40 for _ in layout.groups)
    return CoreBench(
        joined(P, Role.PREFILL, roomy, layout),
        joined(D, Role.DECODE, decode_pages, layout, rows=rows),
        *(joined(name, role, roomy, layout) for name, role in more.items()),
        settings=EARLY if is_on else SETTINGS,
    )


def request(bench: CoreBench, name: str = "r") -> Request:
    return bench.core.fleet.requests[RequestId(name)]


def chunk(bench: CoreBench, name: str = "r", *, worker: WorkerId = P) -> list[Command]:
    """The chunk that the worker has of the prompt is done."""
    seat = request(bench, name).source
    assert seat is not None and seat.worker.worker_id == worker
    row, until = seat.row, seat.chunks[0].until
    is_last = until == seat.lengths.prompt
    return bench.turn(
        report(
            worker,
            seat.worker.seq,
            chunks={row: until},
            tokens={row: 1} if is_last else None,
            ended={row: EndReason.LENGTH} if is_last else None,
        )
    )


def copied(bench: CoreBench, name: str = "r", error: str = "") -> list[Command]:
    """The worker that copies for the request has done so."""
    ticket = request(bench, name).ticket
    assert ticket is not None
    (worker,) = [w for w in bench.core.fleet.workers.values() if ticket in w.tickets]
    return bench.turn(report(worker.worker_id, worker.seq, fetched={ticket: error}))


def pull(ticket: int, length: int, *groups: PullGroup) -> Fetch:
    return Fetch(Ticket(ticket), R, PoolId("p/1"), Incarnation(1), groups, length)


def moved(first_position: int, source: list[int], target: list[int]) -> PullGroup:
    return PullGroup(first_position, pack_ids(source), pack_ids(target))


def pulls(commands: list[Command]) -> list[Fetch]:
    plans = [command for command in commands if isinstance(command, SendPlan)]
    return [op for plan in plans for op in plan.operations if isinstance(op, Fetch)]


def given_up(bench: CoreBench) -> list[tuple[str | None, object]]:
    """Whose early places went, and why."""
    records = [r for r in bench.records if r.event is LogEvent.EARLY_HANDOFF_ENDED]
    return [(record.request_id, record.fields["reason"]) for record in records]


# --- What moves when ---


def test_settled_pages_move_while_the_next_chunk_runs_and_the_rest_at_the_end() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    first = pull(1, 8, moved(0, [0, 1], [0, 1]), NOTHING)
    assert chunk(bench) == [
        SendPlan(P, PlanSeq(2), (grow(0, 1, 2, 3), Chunk(ROW, 16, sample=False))),
        SendPlan(D, PlanSeq(2), (first,)),
    ]
    # One pull at a time: the next one waits for its answer.
    assert pulls(chunk(bench)) == []
    second = pull(2, 16, moved(8, [2, 3], [2, 3]), NOTHING)
    assert copied(bench) == [SendPlan(D, PlanSeq(3), (second,))]
    assert chunk(bench) == [emitted(0)]
    assert bench.phase("r") is Phase.HANDING_OFF
    # The rest of the full group, and the window's [15, 20): the pages that begin at 12 and 16.
    last = pull(3, 20, moved(16, [4], [4]), moved(12, [3, 0], [0, 1]))
    assert copied(bench) == [SendPlan(D, PlanSeq(4), (last,))]
    start = StartRow(ROW, R, 20, 1, 25, (run(0, 0, 1, 2, 3, 4, 5), run(12, 0, 1, 2)))
    assert copied(bench) == [SendPlan(P, PlanSeq(4), ()), SendPlan(D, PlanSeq(5), (start,))]
    assert bench.phase("r") is Phase.DECODING and given_up(bench) == []


def test_with_no_pull_under_way_the_rest_moves_as_soon_as_the_prompt_is_finished() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    copied(bench)
    chunk(bench)
    copied(bench)
    last = pull(3, 20, moved(16, [4], [4]), moved(12, [3, 0], [0, 1]))
    assert chunk(bench) == [emitted(0), SendPlan(D, PlanSeq(4), (last,))]


def test_the_log_says_how_many_bytes_moved_early_and_in_all() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    for step in (chunk, copied, chunk, chunk, copied, copied):
        step(bench)
    (begun,) = [r for r in bench.records if r.event is LogEvent.EARLY_HANDOFF_STARTED]
    assert begun.fields == {"source": P, "target": D}
    (started,) = [r for r in bench.records if r.event is LogEvent.HANDOFF_STARTED]
    assert started.fields["early_tokens"] == 16 and started.fields["length"] == 20
    (done,) = [r for r in bench.records if r.event is LogEvent.HANDOFF_DONE]
    # Each answer says 100 bytes and 5 us.
    assert done.fields["bytes_early"] == 200
    assert done.fields["bytes_moved"] == 300 and done.fields["busy_us"] == 15
    assert done.fields["bytes_saved"] == 48
    assert request(bench).bytes_moved == 300


def test_without_the_flag_pages_of_the_whole_window_group_move_early_as_well() -> None:
    bench = bench_of((16, 14), hybrid(flag=False))
    bench.turn(submitted("r", 20, 6))
    both = moved(0, [0, 1], [0, 1])
    assert pulls(chunk(bench)) == [pull(1, 8, both, both)]
    copied(bench)
    both = moved(8, [2, 3], [2, 3])
    assert pulls(chunk(bench)) == [pull(2, 16, both, both)]
    copied(bench)
    both = moved(16, [4], [4])
    assert pulls(chunk(bench)) == [pull(3, 20, both, both)]


def test_a_page_that_is_not_full_stays_until_it_is() -> None:
    bench = bench_of()
    bench.turn(submitted("first", 6, 1), submitted("r", 24, 6))
    # They share the budget of 8: two positions are left for the second one.
    seq = bench.worker(P).seq
    one = report(P, seq, chunks={0: 6, 1: 2}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    assert pulls(bench.turn(one)) == []
    commands = chunk(bench)
    (fetch,) = pulls(commands)
    assert fetch.length == 8 and request(bench).source is not None


def test_what_was_cached_of_the_prompt_moves_before_a_chunk_is_done() -> None:
    bench = bench_of()
    hashes = tuple(f"{number}".encode() for number in range(5))
    bench.turn(submitted("before", 20, 1, hashes=hashes))
    while bench.phase("before") is Phase.PREFILLING:
        chunk(bench, "before")
    commands = bench.turn(submitted("r", 20, 6, hashes=hashes))
    assert request(bench).cached_tokens == 16
    (fetch,) = pulls(commands)
    assert fetch.length == 16


# --- When there is one ---


@pytest.mark.parametrize(
    ("decode_pages", "rows", "is_early"),
    [
        ((12, 6), 2, True),  # Just enough for two: 6 pages of the full group and 3 windows.
        ((11, 6), 2, False),
        ((12, 5), 2, False),
        ((12, 6), 1, False),
    ],
)
def test_it_is_taken_only_where_another_like_it_would_find_room(
    decode_pages: tuple[int, int], rows: int, is_early: bool
) -> None:
    bench = bench_of(decode_pages, rows=rows)
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    assert (request(bench).early is not None) == is_early


def test_it_is_tried_again_when_more_of_the_prompt_is_settled() -> None:
    bench = bench_of((16, 8), rows=2)
    bench.turn(submitted("decodes", 8, 2))
    chunk(bench, "decodes")
    bench.turn(submitted("r", 28, 6))
    assert bench.phase("decodes") is Phase.HANDING_OFF
    assert pulls(chunk(bench)) == []  # One row is left, and none to spare.
    commands = copied(bench, "decodes")
    end = report(D, bench.worker(D).seq, tokens={0: 1}, ended={0: EndReason.LENGTH})
    commands += bench.turn(end)
    commands += bench.turn(report(D, bench.worker(D).seq))
    assert pulls(commands) == [] and bench.phase("decodes") is Phase.FINISHED
    (fetch,) = pulls(chunk(bench))
    assert fetch.length == 16


def test_there_is_none_when_the_setting_is_off_or_the_prompt_is_one_chunk() -> None:
    bench = bench_of(is_on=False)
    bench.turn(submitted("r", 20, 6))
    assert pulls(chunk(bench)) == [] and request(bench).early is None
    bench = bench_of()
    bench.turn(submitted("r", 8, 6))
    (fetch,) = pulls(chunk(bench))
    assert fetch.length == 8 and bench.phase("r") is Phase.HANDING_OFF
    assert not [r for r in bench.records if r.event is LogEvent.EARLY_HANDOFF_STARTED]


# --- Who takes it back ---


def two_prompts() -> CoreBench:
    """ "r" has an early place on D; "z" goes before it and needs more than is left there.

    D has 13 full pages. "r" was promised 6 of them, and is copying into 2; "z" needs 9.
    """
    bench = bench_of((13, 12))
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    assert request(bench).early is not None
    bench.turn(submitted("z", 32, 6, priority=1))
    chunk(bench)
    seat = request(bench, "z").source
    assert seat is not None
    while seat.chunks[0].until < 32:
        chunk(bench, "z")
    return bench


def test_a_finished_prompt_that_finds_no_room_takes_it_back_at_once() -> None:
    bench = two_prompts()
    copied(bench)  # And another pull begins.
    (fetch,) = pulls(chunk(bench, "z"))
    # What "r" had only been promised is there at once; what it copied into drains.
    assert fetch.request_id == "z" and fetch.length == 32
    assert given_up(bench) == [("r", early.WANTED)]
    assert bench.phase("r") is Phase.PREFILLING and request(bench).ticket is None
    assert bench.draining(D)[0] == 4
    # It runs on, gets no other place before it is finished, and is then handed over whole.
    assert pulls(copied(bench, "z")) == []
    commands = chunk(bench)
    assert bench.phase("r") is Phase.HANDING_OFF and pulls(commands) == []
    end = report(D, bench.worker(D).seq, ended={1: EndReason.END_TOKEN}, tokens={1: 1})
    commands = bench.turn(end)
    commands += bench.turn(report(D, bench.worker(D).seq))
    (fetch,) = pulls(commands)
    assert (fetch.request_id, fetch.length, fetch.groups[0].first_position) == ("r", 20, 0)


def test_a_pull_that_ends_after_its_place_was_taken_back_is_a_late_answer() -> None:
    bench = two_prompts()
    ticket = request(bench).ticket
    assert ticket is not None
    chunk(bench, "z")
    assert bench.draining(D)[0] == 2 and request(bench).early is None
    stale = bench.core.fleet.stale_count
    bench.turn(report(D, bench.worker(D).seq - 1, fetched={ticket: ""}))
    assert bench.core.fleet.stale_count == stale + 1
    assert bench.draining(D)[0] == 2 and request(bench).bytes_moved == 0
    bench.turn(report(D, bench.worker(D).seq))
    assert bench.draining(D)[0] == 0


def decoding_beside() -> CoreBench:
    """ "b" decodes on D and has all pages that are not promised to "r", which is early there.

    D has 17 full pages, of which "r" was promised 6 and has copied into 2.
    """
    bench = bench_of((17,), FULL_ONLY)
    bench.turn(submitted("b", 8, 50))
    chunk(bench, "b")
    copied(bench, "b")
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    copied(bench)
    target = request(bench).early
    assert target is not None
    decoding = bench.worker(D).seats[Row(0)]
    while bench.worker(D).books.available(0):
        bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    assert decoding.holding.covered == 44 and given_up(bench) == []
    return bench


def test_a_row_that_lacks_a_page_takes_it_back_before_anybody_gives_way() -> None:
    bench = decoding_beside()
    decoding = bench.worker(D).seats[Row(0)]
    while decoding.settled < 43:
        bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    assert given_up(bench) == []
    commands = bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    assert given_up(bench) == [("r", early.WANTED)]
    # Four pages were only promised: the row need not wait for those that drain.
    assert not decoding.is_starving and bench.draining(D) == [2]
    assert not [op for op in plan_of(commands, D).operations if isinstance(op, Trim)]
    assert not [r for r in bench.records if r.event is LogEvent.REQUEST_PREEMPTED]
    assert bench.phase("r") is Phase.PREFILLING and not bench.worker(D).early


def test_it_becomes_a_target_only_where_each_row_could_still_grow() -> None:
    bench = decoding_beside()
    chunk(bench)
    chunk(bench)
    # Its own place goes, as if it had had none, and it waits for a destination like others.
    assert given_up(bench) == [("r", early.WANTED)]
    assert bench.phase("r") is Phase.HANDING_OFF and request(bench).target is None


def test_who_must_wait_for_a_destination_holds_none_meanwhile() -> None:
    bench = bench_of((13,), FULL_ONLY, more={D2: Role.DECODE})
    bench.turn(submitted("b", 108, 4))
    while bench.phase("b") is Phase.PREFILLING:
        chunk(bench, "b")
    copied(bench, "b")
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    assert bench.worker(D).early
    # It goes first, is too large for D, and waits for what "b" has on D2.
    bench.turn(submitted("head", 52, 4, priority=1))
    copied(bench)
    chunk(bench)
    while bench.phase("head") is Phase.PREFILLING:
        chunk(bench, "head")
    assert bench.core.fleet.awaiting_target == [request(bench, "head")]
    assert bench.worker(D).early  # "r" still runs, and "head" could not use its place.
    copied(bench)
    chunk(bench)
    assert bench.phase("r") is Phase.HANDING_OFF
    assert given_up(bench) == [("r", early.MUST_WAIT)] and not bench.worker(D).early


def test_a_prompt_that_begins_anew_loses_it_and_may_take_another() -> None:
    bench = bench_of(more={P2: Role.PREFILL})
    bench.turn(submitted("r", 20, 6))
    source = request(bench).source
    assert source is not None
    first = source.worker.worker_id
    second = P2 if first == P else P
    chunk(bench, worker=first)
    assert request(bench).early is not None
    bench.turn(lost(first))
    assert request(bench).early is None and bench.draining(D) == [2, 0]
    (fetch,) = pulls(chunk(bench, worker=second))
    assert fetch.source_pool == f"{second}/1"


# --- What goes wrong ---


@pytest.mark.parametrize("is_copying", [True, False])
def test_a_cancelled_prompt_leaves_nothing_behind(is_copying: bool) -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    ticket = request(bench).ticket
    assert ticket is not None
    if not is_copying:
        copied(bench)
    commands = bench.turn(cancelled("r"))
    assert finished(commands)["r"].reason is EndReason.CANCELLED
    assert bench.draining(D) == [2, 0] and not bench.worker(D).tickets
    late = {int(ticket): ""} if is_copying else None
    bench.turn(report(P, bench.worker(P).seq), report(D, bench.worker(D).seq, fetched=late))
    assert bench.core.fleet.stale_count == is_copying
    assert bench.free(D) == [16, 8] and bench.core.is_idle


def test_the_rest_that_was_not_sent_yet_is_not_sent_for_a_cancelled_request() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    for step in (chunk, chunk, chunk):
        step(bench)
    ticket = request(bench).ticket
    assert ticket is not None and bench.phase("r") is Phase.HANDING_OFF
    seq = bench.worker(D).seq
    commands = bench.turn(report(D, seq, fetched={ticket: ""}), cancelled("r"))
    assert pulls(commands) == []
    bench.turn(report(P, bench.worker(P).seq), report(D, bench.worker(D).seq))
    assert bench.free(D) == [16, 8] and bench.core.is_idle


def test_a_prompt_runs_on_when_its_early_worker_is_lost() -> None:
    bench = bench_of((30, 20), more={D2: Role.DECODE})
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    target = request(bench).early
    assert target is not None
    first = target.worker.worker_id
    bench.turn(lost(first))
    assert given_up(bench) == [("r", early.LOST)]
    assert bench.phase("r") is Phase.PREFILLING and request(bench).restart_count == 0
    assert pulls(chunk(bench)) == []
    (fetch,) = pulls(chunk(bench))
    assert fetch.length == 20 and fetch.groups[0].first_position == 0


def test_a_prompt_runs_on_when_an_early_pull_fails() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    assert finished(copied(bench, error="no such page")) == {}
    assert given_up(bench) == [("r", early.FAILED)]
    assert bench.draining(D) == [2, 0] and bench.phase("r") is Phase.PREFILLING
    assert pulls(chunk(bench)) == []
    (fetch,) = pulls(chunk(bench))
    assert fetch.groups[0].first_position == 0


def test_an_early_pull_that_fails_when_the_prompt_is_finished_is_made_anew_in_whole() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    for step in (chunk, chunk, chunk):
        step(bench)
    (fetch,) = pulls(copied(bench, error="no such page"))
    assert fetch.groups[0].first_position == 0 and fetch.length == 20
    commands = copied(bench)
    assert isinstance(plan_of(commands, D).operations[-1], StartRow)


def test_a_worker_with_an_early_place_and_no_pull_owes_nothing() -> None:
    bench = bench_of()
    bench.turn(submitted("r", 20, 6))
    chunk(bench)
    worker = bench.worker(D)
    assert worker.is_working and patience_ends_us(worker, EARLY) == STALL_US
    copied(bench)
    assert request(bench).early is not None
    assert not worker.is_working and patience_ends_us(worker, EARLY) is None


def test_a_worker_that_does_not_answer_an_early_pull_becomes_suspect() -> None:
    bench = bench_of((30, 20), more={D2: Role.DECODE})
    bench.turn(submitted("r", 20, 6))
    bench.now_us = STALL_US - 1
    chunk(bench)
    target = request(bench).early
    assert target is not None
    bench.now_us = 2 * STALL_US - 2
    chunk(bench)  # The prompt goes on meanwhile.
    assert not target.worker.is_suspect
    bench.now_us += 2
    bench.turn()
    assert target.worker.is_suspect and given_up(bench) == [("r", early.LOST)]
    assert bench.phase("r") is Phase.PREFILLING
