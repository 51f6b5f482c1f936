"""One request alone: these events give exactly these commands."""

from fakes.core_bench import (
    FULL_ONLY,
    SETTINGS,
    B,
    CoreBench,
    D,
    P,
    emitted,
    grow,
    handle,
    hybrid,
    joined,
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
    Peer,
    PlanSeq,
    PoolId,
    PullGroup,
    RequestId,
    Role,
    Row,
    Ticket,
    Usage,
    pack_ids,
)
from tidegate.kvcache.layout import Group, Layout, Tail, Tokens
from tidegate.scheduler.commands import (
    AcceptRequest,
    FinishRequest,
    SendPlan,
    StartRow,
)
from tidegate.scheduler.core import Core
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings

R = RequestId("r")
ROW = Row(0)


def pair(counts: tuple[int, int] = (8, 4), *, flag: bool = True) -> CoreBench:
    layout = hybrid(flag=flag)
    return CoreBench(
        joined(P, Role.PREFILL, counts, layout), joined(D, Role.DECODE, counts, layout)
    )


def end(reason: EndReason, prompt: int, output: int) -> FinishRequest:
    return FinishRequest(R, reason, Usage(prompt, 0, output), "", 200)


def test_a_decode_worker_is_told_of_the_pools_that_it_may_copy_from() -> None:
    core = Core(SETTINGS)
    core.apply(joined(D, Role.DECODE, (8, 4)), 0)
    assert core.plan(0) == []
    core.apply(joined(P, Role.PREFILL, (6, 3)), 0)
    peer = Peer(PoolId("p/1"), Incarnation(1), handle(P, (6, 3)))
    assert core.plan(0) == [SendPlan(D, PlanSeq(1), (peer,))]


def test_a_prompt_runs_in_chunks_moves_its_window_and_is_decoded_elsewhere() -> None:
    bench = pair()
    assert bench.turn(submitted("r", 20, 6)) == [
        AcceptRequest(R, 6),
        SendPlan(
            P,
            PlanSeq(1),
            (
                StartRow(ROW, R, 0, 0, 20, (run(0, 0, 1, 2, 3, 4), run(0))),
                grow(0, 1, 0, 1),
                Chunk(ROW, 8, sample=False),
            ),
        ),
    ]
    # Query 8 reads from 3 on: both window pages stay, and two more are there for the chunk.
    assert bench.turn(report(P, 1, chunks={0: 8})) == [
        SendPlan(P, PlanSeq(2), (grow(0, 1, 2, 3), Chunk(ROW, 16, sample=False)))
    ]
    # Query 16 reads from 11 on: pages 0 and 1 are free, and page 0 is granted anew.
    assert bench.turn(report(P, 2, chunks={0: 16})) == [
        SendPlan(P, PlanSeq(3), (grow(0, 1, 0), Chunk(ROW, 20, sample=True)))
    ]
    ended = report(P, 3, chunks={0: 20}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    # The window group moves [15, 20) only: the pages that begin at 12 and 16.
    pull = Fetch(
        Ticket(1),
        R,
        PoolId("p/1"),
        Incarnation(1),
        (
            PullGroup(0, pack_ids([0, 1, 2, 3, 4]), pack_ids([0, 1, 2, 3, 4])),
            PullGroup(12, pack_ids([3, 0]), pack_ids([0, 1])),
        ),
        20,
    )
    assert bench.turn(ended) == [
        emitted(0),
        SendPlan(D, PlanSeq(2), (pull,)),
    ]
    assert bench.turn(report(D, 2, fetched={1: ""})) == [
        SendPlan(P, PlanSeq(4), ()),
        SendPlan(
            D,
            PlanSeq(3),
            (StartRow(ROW, R, 20, 1, 25, (run(0, 0, 1, 2, 3, 4, 5), run(12, 0, 1, 2))),),
        ),
    ]
    assert bench.turn(report(D, 3, tokens={0: 2})) == [emitted(1)]
    # At position 23 the row has pages for one token more. Up to 25, a page of each group is
    # missing.
    assert bench.turn(report(D, 3, tokens={0: 1})) == [
        emitted(3),
        SendPlan(D, PlanSeq(4), (grow(0, 0, 6), grow(0, 1, 0))),
    ]
    assert bench.turn(report(D, 4, tokens={0: 1})) == [emitted(4)]
    last = report(D, 4, tokens={0: 1}, ended={0: EndReason.LENGTH})
    assert bench.turn(last) == [
        emitted(5),
        end(EndReason.LENGTH, 20, 6),
        SendPlan(D, PlanSeq(5), ()),
    ]
    assert bench.turn(report(P, 4), report(D, 5)) == []
    assert bench.free(P) == [8, 4] and bench.free(D) == [8, 4]
    assert bench.core.is_idle


def test_without_the_flag_all_window_pages_stay_and_all_move() -> None:
    bench = pair((8, 5), flag=False)
    bench.turn(submitted("r", 20, 6))
    bench.turn(report(P, 1, chunks={0: 8}))
    bench.turn(report(P, 2, chunks={0: 16}))
    ended = report(P, 3, chunks={0: 20}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    (_, plan) = bench.turn(ended)
    assert isinstance(plan, SendPlan)
    (pull,) = plan.operations
    assert isinstance(pull, Fetch)
    whole = pack_ids([0, 1, 2, 3, 4])
    assert pull.groups == (PullGroup(0, whole, whole), PullGroup(0, whole, whole))
    # Of the target's window pages those below 15 are free before the first decode page.
    (_, plan) = bench.turn(report(D, 2, fetched={1: ""}))
    assert isinstance(plan, SendPlan)
    pages = (run(0, 0, 1, 2, 3, 4, 5), run(12, 3, 4, 0))
    assert plan.operations == (StartRow(ROW, R, 20, 1, 25, pages),)


def test_the_log_says_how_many_bytes_moved_and_how_many_were_saved() -> None:
    bench = pair()
    bench.hand_over("r", 20, 6)
    (done,) = [r for r in bench.records if r.event is LogEvent.HANDOFF_DONE]
    # Three window pages of four positions, four bytes each, stayed behind.
    assert done.fields["bytes_moved"] == 100 and done.fields["bytes_saved"] == 48


def test_a_tail_of_which_the_rest_was_never_kept_saves_nothing() -> None:
    hybrid_layout = hybrid(flag=False)
    tail = Group("tail", Tail(Tokens(4), 1), Tokens(4), hybrid_layout.groups[0].tensors)
    layout = Layout((*hybrid_layout.groups, tail), False)
    bench = CoreBench(
        joined(P, Role.PREFILL, (8, 8, 4), layout), joined(D, Role.DECODE, (8, 8, 4), layout)
    )
    bench.hand_over("r", 20, 6)
    (done,) = [r for r in bench.records if r.event is LogEvent.HANDOFF_DONE]
    assert done.fields["bytes_saved"] == 0


def test_one_token_is_sampled_where_the_prompt_ran() -> None:
    bench = pair()
    commands = bench.turn(submitted("r", 8, 1))
    start = StartRow(ROW, R, 0, 0, 8, (run(0, 0, 1), run(0)))
    plan = SendPlan(P, PlanSeq(1), (start, grow(0, 1, 0, 1), Chunk(ROW, 8, sample=True)))
    assert commands == [AcceptRequest(R, 1), plan]
    last = report(P, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    assert bench.turn(last) == [
        emitted(0),
        end(EndReason.LENGTH, 8, 1),
        SendPlan(P, PlanSeq(2), ()),
    ]


def test_a_request_that_ends_on_the_prefill_worker_is_not_handed_over() -> None:
    for reason in (EndReason.END_TOKEN, EndReason.STOP_ID):
        bench = pair()
        bench.turn(submitted("r", 8, 6))
        last = report(P, 1, chunks={0: 8}, tokens={0: 1}, ended={0: reason})
        assert bench.turn(last) == [
            emitted(0),
            end(reason, 8, 1),
            SendPlan(P, PlanSeq(2), ()),
        ]


def test_a_worker_of_role_both_goes_on_decoding_in_the_same_row() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (4, 3)))
    start = StartRow(ROW, R, 0, 0, 12, (run(0, 0, 1, 2), run(0)))
    assert bench.turn(submitted("r", 8, 5)) == [
        AcceptRequest(R, 5),
        SendPlan(B, PlanSeq(1), (start, grow(0, 1, 0, 1), Chunk(ROW, 8, sample=True))),
    ]
    # The row may feed positions 8 to 11, for which the window group lacks a page.
    assert bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1})) == [
        emitted(0),
        SendPlan(B, PlanSeq(2), (grow(0, 1, 2),)),
    ]
    last = report(B, 2, tokens={0: 4}, ended={0: EndReason.LENGTH})
    assert bench.turn(last) == [
        emitted(1),
        end(EndReason.LENGTH, 8, 5),
        SendPlan(B, PlanSeq(3), ()),
    ]
    bench.turn(report(B, 3))
    assert bench.free(B) == [4, 3]


def test_with_role_both_the_flag_does_not_apply() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (20, 3), hybrid(flag=False)))
    assert bench.turn(submitted("r", 60, 5))[0] == AcceptRequest(R, 5)


def test_without_a_chunk_budget_a_chunk_is_cut_to_the_pages_in_hand() -> None:
    settings = CoreSettings(chunk_tokens=None)
    bench = CoreBench(joined(B, Role.BOTH, (20, 4)), settings=settings)
    (_, plan) = bench.turn(submitted("r", 40, 1))
    assert isinstance(plan, SendPlan)
    assert plan.operations[1:] == (grow(0, 1, 0, 1, 2, 3), Chunk(ROW, 16, sample=False))
    # Query 16 reads from 11 on: two of the four pages come back for the next chunk.
    (plan,) = bench.turn(report(B, 1, chunks={0: 16}))
    assert isinstance(plan, SendPlan)
    assert plan.operations == (grow(0, 1, 0, 1), Chunk(ROW, 24, sample=False))


def test_a_chunk_may_end_inside_a_page() -> None:
    settings = CoreSettings(chunk_tokens=Tokens(3), chunks_in_flight=1)
    bench = CoreBench(joined(B, Role.BOTH, (5,), FULL_ONLY), settings=settings)
    bench.turn(submitted("r", 7, 1))
    (plan,) = bench.turn(report(B, 1, chunks={0: 3}))
    assert isinstance(plan, SendPlan)
    assert plan.operations == (Chunk(ROW, 6, sample=False),)


def test_a_window_row_feeds_one_token_a_turn_when_its_floor_is_all_there_is() -> None:
    # The floor is ceil(5 / 4) + 1 = 3 pages; the pool has no other.
    bench = CoreBench(joined(B, Role.BOTH, (10, 3)))
    bench.turn(submitted("r", 12, 20))
    bench.turn(report(B, 1, chunks={0: 8}))
    bench.turn(report(B, 2, chunks={0: 12}, tokens={0: 1}))
    seat = bench.worker(B).seats[ROW]
    fed = 12
    while bench.phase("r") is Phase.DECODING:
        reach = min(seat.holding.covered, 31)
        assert reach > fed, "the row is starved"
        is_last = reach == 31
        ended = {0: EndReason.LENGTH} if is_last else None
        bench.turn(report(B, bench.worker(B).seq, tokens={0: reach - fed}, ended=ended))
        fed = reach
    assert fed == 31
