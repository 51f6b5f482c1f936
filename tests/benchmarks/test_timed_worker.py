"""Workers in virtual time: how long launches last, and what their reports say."""

from cost_model import Costs
from tidegate.ipc.protocol import (
    Chunk,
    ChunkDone,
    EndReason,
    Fetch,
    Grow,
    Incarnation,
    Limit,
    PageRun,
    PlanSeq,
    PoolId,
    PullGroup,
    RequestId,
    Role,
    Row,
    RowEnd,
    Stop,
    Ticket,
    Trim,
    Trimmed,
    WorkerId,
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.layout import All, Group, Layout, Pages, TensorSpec, Tokens, Window
from tidegate.scheduler.commands import PlanOperation, SendPlan, StartRow
from timed_worker import GATHER_US, TimedWorker, join_worker

TENSOR = TensorSpec("k", 0, (5,), "bfloat16")
LAYOUT = Layout(
    (
        Group("full", All(), Tokens(4), (TENSOR,)),
        Group("window", Window(Tokens(8)), Tokens(4), (TENSOR,)),
    ),
    True,
)
COSTS = Costs(100.0, 10.0, 0.0, 50.0, 1.0, 0.0, 2.0)
ONE, TWO = RequestId("one"), RequestId("two")


def make_worker() -> TimedWorker:
    pages = [Pages(64)] * len(LAYOUT.groups)
    joined = join_worker("worker", Role.BOTH, 0, LAYOUT, pages, 8, 1024)
    return TimedWorker(joined, COSTS, {ONE: 8, TWO: 8})


def plan(seq: int, *operations: PlanOperation) -> SendPlan:
    return SendPlan(WorkerId("worker"), PlanSeq(seq), operations)


def pages(count: int) -> bytes:
    return pack_ids(range(count))


def start(
    row: int, request_id: RequestId, position: int, page_count: int, limit: int
) -> StartRow:
    """A row that has sampled one token for each position beyond its prompt of 8."""
    runs = (PageRun(0, pages(page_count)), PageRun(0, pages(page_count)))
    return StartRow(Row(row), request_id, position, max(0, position - 7), limit, runs)


def test_a_chunk_and_a_row_that_decodes_share_a_launch() -> None:
    worker = make_worker()
    worker.receive(
        plan(1, start(0, ONE, 0, 2, 8), Chunk(Row(0), 8, True), start(1, TWO, 8, 3, 11))
    )
    _, launch = worker.step(1000)
    # 8 prompt tokens, two rows that sample.
    assert launch is not None and launch.end_us == 1000 + 100 + 80 + 50 + 2
    landed, report = worker.land()
    assert landed.chunks == (ChunkDone(Row(0), 8),)
    assert sorted(unpack_ids(report.rows)) == [0, 1] and unpack_ids(report.counts) == (1, 1)
    assert report.ended == (RowEnd(Row(0), EndReason.LENGTH),)
    assert (report.applied, report.completed, report.busy_us) == (1, 1, 232)


def test_rows_run_ahead_to_the_end_of_their_pages_or_to_their_limit() -> None:
    worker = make_worker()
    worker.receive(plan(1, start(0, ONE, 8, 3, 30), start(1, TWO, 8, 3, 10)))
    _, launch = worker.step(0)
    assert launch is not None
    counts = {each.request_id: (each.count, each.last_us) for each in launch.sampled}
    # Two steps of two rows, then two of the one whose pages reach to 12.
    assert counts == {ONE: (4, 2 * 152 + 2 * 151), TWO: (2, 2 * 152)}
    _, report = worker.land()
    assert report.ended == (RowEnd(Row(1), EndReason.LENGTH),)
    assert worker.step(606) == ([], None), "a row out of pages sits out"
    worker.receive(plan(2, Grow(Row(0), 0, pages(1)), Grow(Row(0), 1, pages(1))))
    _, launch = worker.step(606)
    assert launch is not None and launch.sampled[0].count == 4


def test_a_row_gives_up_the_pages_that_it_has_not_fed_and_sits_out_at_a_limit() -> None:
    worker = make_worker()
    worker.receive(plan(1, start(0, ONE, 8, 6, 30), Limit(Row(0), 10), Trim(Row(0), 13)))
    _, launch = worker.step(0)
    assert launch is not None and launch.sampled[0].count == 2
    _, report = worker.land()
    assert report.trimmed == (Trimmed(Row(0), (2, 2)),) and report.ended == ()
    assert worker.step(302) == ([], None)
    worker.receive(plan(2, Limit(Row(0), 30)))
    _, launch = worker.step(302)
    assert launch is not None and launch.sampled[0].count == 6
    assert worker.land()[1].trimmed == ()


def test_reports_are_gathered_for_so_long_and_no_longer() -> None:
    worker = make_worker()
    worker.receive(plan(1, start(0, ONE, 8, 60, 200)))
    _, launch = worker.step(0)
    assert launch is not None
    assert GATHER_US <= launch.end_us < GATHER_US + 151


def test_a_row_gives_up_the_pages_that_it_does_not_feed_next() -> None:
    worker = make_worker()
    worker.receive(plan(1, start(0, ONE, 8, 9, 200), start(1, TWO, 8, 3, 200)))
    worker.receive(plan(2, Trim(Row(0), 14), Trim(Row(1), 10), Limit(Row(1), 8)))
    _, launch = worker.step(0)
    # It keeps 4 pages of 9, as 14 positions are to stay; the other sits out.
    assert launch is not None
    assert [(each.request_id, each.count) for each in launch.sampled] == [(ONE, 8)]
    _, report = worker.land()
    assert report.trimmed == (Trimmed(Row(0), (5, 5)), Trimmed(Row(1), (0, 0)))
    worker.receive(plan(3, Limit(Row(1), 200)))
    _, launch = worker.step(5000)
    assert launch is not None and launch.sampled[0].request_id == TWO
    assert worker.land()[1].trimmed == (), "it is told once"


def test_plans_wait_for_the_launch_to_end() -> None:
    worker = make_worker()
    worker.receive(plan(1, start(0, ONE, 8, 60, 200)))
    worker.step(0)
    worker.receive(plan(2, Stop(Row(0))))
    assert worker.step(10) == ([], None)
    _, report = worker.land()
    assert report.completed == 1
    assert worker.step(GATHER_US) == ([], None)
    idle = worker.idle_report()
    assert idle is not None and idle.completed == 2
    assert worker.idle_report() is None, "it is said once"


def test_pulls_follow_one_another_and_later_plans_are_completed_after_them() -> None:
    worker = make_worker()
    groups = tuple(PullGroup(0, pages(3), pages(3)) for _ in LAYOUT.groups)
    source = PoolId("source"), Incarnation(7)
    fetches = [Fetch(Ticket(n), ONE, *source, groups, 12) for n in (1, 2)]
    worker.receive(plan(1))
    worker.receive(plan(2, *fetches))
    pulls, launch = worker.step(1000)
    assert launch is None
    # 3 pages of 40 bytes in either group, two bytes in a microsecond.
    assert [(pull.byte_count, pull.end_us) for pull in pulls] == [(240, 1120), (240, 1240)]
    worker.receive(plan(3))
    worker.step(1010)
    first = worker.land_pull(pulls[0])
    assert [(r.ticket, r.error, r.byte_count) for r in first.fetched] == [(1, "", 240)]
    assert first.applied == 3 and first.completed == 2, "the other was begun before plan 3"
    assert worker.land_pull(pulls[1]).completed == 3
