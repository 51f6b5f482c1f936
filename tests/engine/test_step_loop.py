"""The step loop over a link in memory: what it answers, when, and what it logs."""

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.memory_link import MemoryLink
from fakes.tiny_model import EOS_ID, VOCAB_SIZE, tiny_config, tiny_model
from tidegate.engine.failures import LinkBroken, WorkerRejected
from tidegate.engine.models.registry import layout_for
from tidegate.engine.rows import RowTable
from tidegate.engine.runner import Runner
from tidegate.engine.step_loop import REPORT_INTERVAL_S_MIN, StepLoop
from tidegate.ipc.log import configure
from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Chunk,
    ChunkDone,
    EndReason,
    Fault,
    Fetch,
    Grow,
    Incarnation,
    Limit,
    Operation,
    PageRun,
    Peer,
    PeerGone,
    Plan,
    PlanSeq,
    Poison,
    PoolId,
    PullGroup,
    Report,
    RequestId,
    Row,
    RowEnd,
    Sampling,
    Start,
    Stop,
    Ticket,
    Trim,
    Welcome,
    WorkerRefused,
    encode,
    pack_ids,
    unpack_ids,
)
from tidegate.ipc.transport.shared_memory import SharedMemoryTransport
from tidegate.kvcache.page_store import PageStore

WELCOME = Welcome(PROTOCOL_VERSION, "epoch", PoolId("w/1"), Incarnation(1), 8, 1000)
PAGE = 8
COUNTS = (40, 40)


class Worker:
    """A step loop with a tiny hybrid model, stepped by hand."""

    def __init__(self, log_file: Path) -> None:
        config = tiny_config("gemma3")
        layout = layout_for(config, PAGE, "float32")
        self.link = MemoryLink()
        self.store = PageStore(layout, COUNTS)
        self.table = RowTable(layout, COUNTS, WELCOME.row_count, VOCAB_SIZE, (EOS_ID,))
        runner = Runner(tiny_model(config), self.store, self.table)
        transport = SharedMemoryTransport(layout, self.store.geometry, self.store.buffer)
        self.log_file = log_file
        log = configure("w", str(log_file), "debug")
        self.loop = StepLoop(
            self.link, self.table, runner, self.store, transport, WELCOME, log, self.link.clock
        )
        self.seq = 0
        self.launch_s = 0.01

    def plan(self, *operations: Operation) -> None:
        self.seq += 1
        self.link.arrive(Plan(PlanSeq(self.seq), operations))

    def step(self) -> list[Report | Fault]:
        """One step; what it sent. Launches take `launch_s`."""
        self.link.now_s += self.launch_s
        self.loop.step()
        messages = self.link.take_sent()
        kept = [message for message in messages if isinstance(message, Report | Fault)]
        assert len(kept) == len(messages)
        return kept

    def report(self) -> Report:
        (message,) = self.step()
        assert isinstance(message, Report)
        return message

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log_file.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "log.jsonl")


def start(row: int = 0, *, length: int = 10, limit: int = 20, pages: int = 3) -> Start:
    """A prompt with `pages` pages in each group."""
    ids = pack_ids(range(row * 5, row * 5 + pages))
    return Start(
        Row(row),
        RequestId(f"r{row}"),
        0,
        pack_ids(range(2, 2 + length)),
        0,
        limit,
        (PageRun(0, ids), PageRun(0, ids)),
        Sampling(),
        b"",
        ignore_eos=True,
    )


def fetch_of(source: PageStore, ticket: int = 1) -> tuple[Peer, Fetch]:
    peer = Peer(PoolId("p/1"), Incarnation(1), source.handle())
    pull = PullGroup(0, pack_ids([3, 1]), pack_ids([30, 31]))
    return peer, Fetch(
        Ticket(ticket), RequestId("r9"), peer.pool, peer.incarnation, (pull, pull), 16
    )


def test_a_plan_that_gives_no_work_is_answered_at_once(worker: Worker) -> None:
    worker.plan()
    report = worker.report()
    assert (report.applied, report.completed, report.launch, report.rows) == (1, 1, 0, b"")
    worker.plan(Stop(Row(3)), Grow(Row(2), 0, b""))
    assert worker.report().completed == 2


def test_a_request_runs_through_launches_that_are_each_reported(worker: Worker) -> None:
    worker.plan(start(limit=12), Chunk(Row(0), 6, False), Chunk(Row(0), 10, True))
    first, second, third, fourth = (worker.report() for _ in range(4))
    assert (first.chunks, first.rows, first.launch) == ((ChunkDone(Row(0), 6),), b"", 1)
    assert (second.chunks, second.rows) == ((ChunkDone(Row(0), 10),), pack_ids([0]))
    assert (third.chunks, third.counts, len(unpack_ids(third.tokens))) == (
        (),
        pack_ids([1]),
        1,
    )
    assert fourth.ended == (RowEnd(Row(0), EndReason.LENGTH),)
    assert fourth.busy_us > 0
    assert all(report.applied == 1 for report in (first, second, third, fourth))
    assert worker.step() == [], "nothing is left to tell before the interval has passed"


def test_an_idle_worker_waits_and_shows_now_and_then_that_it_lives(worker: Worker) -> None:
    reports = [message for _ in range(60) for message in worker.step()]
    assert 50 <= len(reports) <= 61
    assert all(wait >= 1 for wait in worker.link.waits_ms)
    assert max(worker.link.waits_ms) <= WELCOME.report_interval_ms + 1
    # It waited all the time, in few waits: it does not spin.
    assert sum(worker.link.waits_ms) >= 50_000
    assert len(worker.link.waits_ms) == 60


def test_a_working_loop_does_not_wait(worker: Worker) -> None:
    worker.plan(start(), Chunk(Row(0), 10, True))
    for _ in range(5):
        worker.step()
    assert worker.link.waits_ms == []


def test_starved_rows_are_told_and_wait_for_their_pages(worker: Worker) -> None:
    worker.plan(start(pages=2), Chunk(Row(0), 10, True))
    for _ in range(7):
        worker.step()
    worker.plan()
    report = worker.report()
    assert (report.starved, report.rows) == (pack_ids([0]), b"")
    worker.plan(Grow(Row(0), 0, pack_ids([20])), Grow(Row(0), 1, pack_ids([20])))
    assert worker.report().rows == pack_ids([0])


def test_a_stopped_row_is_in_no_later_report(worker: Worker) -> None:
    worker.plan(start(0), Chunk(Row(0), 10, True), start(1), Chunk(Row(1), 10, True))
    assert worker.report().rows == pack_ids([0, 1])
    worker.plan(Stop(Row(0)))
    assert worker.report().rows == pack_ids([1])
    assert worker.report().rows == pack_ids([1])


def test_a_row_can_be_stopped_between_its_chunks(worker: Worker) -> None:
    worker.plan(start(0), Chunk(Row(0), 4, False), Chunk(Row(0), 10, True))
    assert worker.report().chunks == (ChunkDone(Row(0), 4),)
    worker.plan(Stop(Row(0)))
    report = worker.report()
    assert (report.completed, report.chunks, report.rows) == (2, (), b"")


def test_a_row_that_sits_out_is_still_there(worker: Worker) -> None:
    worker.plan(start(), Chunk(Row(0), 10, True), Limit(Row(0), 10))
    assert worker.report().rows == pack_ids([0])
    assert worker.step() == []
    worker.plan(Limit(Row(0), 20))
    assert worker.report().rows == pack_ids([0])


def test_who_begins_and_who_is_stopped_is_in_or_out_of_the_very_next_launch(
    worker: Worker,
) -> None:
    """However far the pages of the others reach."""
    worker.plan(start(0), Chunk(Row(0), 10, True), start(1), Chunk(Row(1), 10, True))
    assert unpack_ids(worker.report().rows) == (0, 1)
    worker.plan(Stop(Row(0)), start(2), Chunk(Row(2), 10, True))
    assert unpack_ids(worker.report().rows) == (1, 2)


def test_pages_that_a_row_gives_up_are_told_with_the_answer(worker: Worker) -> None:
    worker.plan(start(), Chunk(Row(0), 10, True))
    worker.report()
    worker.plan(Trim(Row(0), 10), Trim(Row(5), 10))
    (trimmed,) = worker.report().trimmed
    assert trimmed.row == 0 and len(trimmed.page_counts) == len(COUNTS)
    assert worker.report().trimmed == ()


# --- Launches that share a report ---


def decoding(worker: Worker, *rows: int) -> None:
    """Rows that decode, of which the first token has been told."""
    operations = [(start(row), Chunk(Row(row), 10, True)) for row in rows]
    worker.plan(*(operation for pair in operations for operation in pair))
    worker.report()
    worker.launch_s = 0.0007


def test_quick_launches_share_a_report_with_each_row_named_once(worker: Worker) -> None:
    decoding(worker, 0, 1)
    assert worker.step() == [] and worker.step() == []
    report = worker.report()
    assert unpack_ids(report.rows) == (0, 1) and unpack_ids(report.counts) == (3, 3)
    together = unpack_ids(report.tokens)
    other = Worker(worker.log_file.with_name("other.jsonl"))
    decoding(other, 0, 1)
    other.launch_s = 2 * REPORT_INTERVAL_S_MIN
    apart = [unpack_ids(other.report().tokens) for _ in range(3)]
    assert together == tuple(row[0] for row in apart) + tuple(row[1] for row in apart)


def test_an_end_is_told_at_once_with_all_that_came_before(worker: Worker) -> None:
    worker.plan(start(0, limit=12), Chunk(Row(0), 10, True))
    worker.report()
    worker.launch_s = 0.0001
    assert worker.step() == []
    report = worker.report()
    assert report.ended == (RowEnd(Row(0), EndReason.LENGTH),)
    assert unpack_ids(report.counts) == (2,)


def test_a_chunk_is_told_at_once(worker: Worker) -> None:
    decoding(worker, 0)
    worker.plan(start(1), Chunk(Row(1), 4, False))
    assert worker.report().chunks == (ChunkDone(Row(1), 4),)


def test_an_answer_to_a_plan_waits_for_the_report_that_is_due(worker: Worker) -> None:
    decoding(worker, 0)
    worker.plan()
    assert worker.step() == [] and worker.step() == []
    assert worker.report().completed == 2


def test_what_was_gathered_is_told_before_the_worker_waits(worker: Worker) -> None:
    decoding(worker, 0)
    assert worker.step() == []
    worker.plan(Limit(Row(0), 0))
    report = worker.report()
    assert (unpack_ids(report.counts), report.completed) == ((1,), 2)


def test_tokens_of_a_row_that_is_stopped_meanwhile_are_told_with_the_answer(
    worker: Worker,
) -> None:
    """So the scheduler drops them before it can give the row's number to another."""
    decoding(worker, 0)
    assert worker.step() == []
    worker.plan(Stop(Row(0)), start(1), Chunk(Row(1), 10, True))
    report = worker.report()
    assert (unpack_ids(report.rows), report.completed) == ((0, 1), 2)


def test_plans_that_arrive_together_are_applied_before_one_launch(worker: Worker) -> None:
    worker.plan(start(0), Chunk(Row(0), 10, True))
    worker.plan(start(1), Chunk(Row(1), 10, True))
    report = worker.report()
    assert (report.applied, report.completed) == (2, 2)
    assert report.rows == pack_ids([0, 1])


def test_a_fetch_is_done_in_order_and_told_before_the_launch(worker: Worker) -> None:
    source = PageStore(worker.store.layout, COUNTS)
    for tensor in (source.tensor(0, 0), source.tensor(1, 1)):
        tensor[1] = 1.5
        tensor[3] = 3.5
    peer, fetch = fetch_of(source)
    # Poison of pages that were freed comes before they are filled anew.
    worker.plan(Poison(0, pack_ids([30])), peer, fetch, start(), Chunk(Row(0), 10, True))
    first, second = worker.step()
    assert isinstance(first, Report) and isinstance(second, Report)
    (result,) = first.fetched
    page_bytes = sum(group.page_bytes for group in worker.store.layout.groups)
    assert (result.ticket, result.error, result.byte_count) == (1, "", 2 * page_bytes)
    assert (first.completed, first.rows, first.chunks) == (1, b"", ())
    assert (second.fetched, second.rows) == ((), pack_ids([0]))
    for tensor in (worker.store.tensor(0, 0), worker.store.tensor(1, 1)):
        assert bool((tensor[30] == 3.5).all()) and bool((tensor[31] == 1.5).all())


def test_a_fetch_that_fails_is_told_and_the_loop_goes_on(worker: Worker) -> None:
    source = PageStore(worker.store.layout, COUNTS)
    peer, fetch = fetch_of(source)
    worker.plan(fetch)
    report = worker.step()[0]
    assert isinstance(report, Report)
    assert "is not known" in report.fetched[0].error
    worker.plan(peer, PeerGone(peer.pool, peer.incarnation), fetch)
    report = worker.step()[0]
    assert isinstance(report, Report)
    assert "is not known" in report.fetched[0].error
    assert worker.lines("fetch_done")[0]["level"] == "warning"


def test_poison_fills_pages_with_nan_and_a_senseless_one_is_logged(worker: Worker) -> None:
    worker.plan(Poison(1, pack_ids([5, 7])), Poison(2, b""), Poison(0, pack_ids([40])))
    assert worker.report().completed == 1
    tensor = worker.store.tensor(1, 0)
    assert bool(tensor[[5, 7]].isnan().all()) and not bool(tensor[6].isnan().any())
    assert len(worker.lines("internal_error")) == 2


def test_a_bad_operation_is_a_fault_of_its_row_and_the_plan_is_answered(
    worker: Worker,
) -> None:
    worker.plan(
        start(0),
        Chunk(Row(0), 11, True),
        start(1),
        Chunk(Row(1), 10, True),
        Grow(Row(6), 9, b"x"),
    )
    fault, report = worker.step()
    assert isinstance(fault, Fault) and isinstance(report, Report)
    assert (fault.row, fault.request_id, fault.kind) == (0, "r0", "bad_plan")
    assert (report.completed, report.rows) == (1, pack_ids([1]))
    assert worker.table.ignored_count == 1
    # The row number can be used again.
    worker.plan(start(0), Chunk(Row(0), 10, True))
    assert worker.report().rows == pack_ids([1, 0])


def test_a_row_that_fails_in_the_model_is_a_fault(worker: Worker) -> None:
    worker.plan(start(0), Chunk(Row(0), 10, True))
    worker.report()
    worker.plan(Poison(0, pack_ids([0])))
    fault, report = worker.step()
    assert isinstance(fault, Fault) and isinstance(report, Report)
    assert (fault.kind, report.rows) == ("logits_not_finite", b"")
    assert worker.lines("row_fault")[0]["request_id"] == "r0"


def test_the_log_tells_of_rows_fetches_and_launches_but_not_of_tokens(worker: Worker) -> None:
    source = PageStore(worker.store.layout, COUNTS)
    peer, fetch = fetch_of(source)
    worker.plan(peer, fetch, start(0, limit=10), Chunk(Row(0), 10, True), start(1))
    worker.step()
    worker.plan(Stop(Row(1)))
    worker.step()
    started = worker.lines("row_started")
    assert [(line["request_id"], line["row"]) for line in started] == [("r0", 0), ("r1", 1)]
    assert started[0]["tokens"] == 10
    ended = [(line["request_id"], line["reason"]) for line in worker.lines("row_ended")]
    assert ended == [("r0", "length"), ("r1", "stopped")]
    (fetched,) = worker.lines("fetch_done")
    assert (fetched["request_id"], fetched["length"]) == ("r9", 16)
    assert fetched["bytes"] > 0
    (launch,) = worker.lines("launch")
    assert (launch["level"], launch["rows"], launch["tokens"]) == ("debug", 1, 10)


OTHER_WELCOME = Welcome(PROTOCOL_VERSION, "other", PoolId("w/2"), Incarnation(2), 8, 1000)


@pytest.mark.parametrize(
    ("frame", "failure", "words"),
    [
        (encode(Plan(PlanSeq(2), ())), LinkBroken, "plan 2 came after plan 0"),
        (encode(Plan(PlanSeq(0), ())), LinkBroken, "plan 0 came after plan 0"),
        (b"\xc1", LinkBroken, "malformed frame"),
        (encode(WorkerRefused("it was silent")), WorkerRejected, "it was silent"),
        (encode(OTHER_WELCOME), LinkBroken, "welcomed this worker twice"),
    ],
)
def test_a_frame_that_cannot_be_ends_the_loop(
    worker: Worker, frame: bytes, failure: type[Exception], words: str
) -> None:
    worker.link.inbox.append(frame)
    with pytest.raises(failure, match=words):
        worker.loop.run()


def test_a_connection_that_was_lost_ends_the_loop(worker: Worker) -> None:
    worker.plan()
    worker.link.lost = True
    with pytest.raises(LinkBroken, match="connection to the scheduler was lost"):
        worker.loop.run()


def test_the_same_welcome_again_is_only_the_answer_to_a_repeated_hello(worker: Worker) -> None:
    worker.link.arrive(WELCOME)
    worker.plan()
    assert worker.report().applied == 1
