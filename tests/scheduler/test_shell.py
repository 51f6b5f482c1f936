"""The shell with a virtual clock and links in memory."""

import random
from collections import deque

import trio
import trio.testing

from tidegate.ipc.log import Log
from tidegate.ipc.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Chunk,
    ChunkDone,
    ClientToScheduler,
    EndReason,
    Fetch,
    FetchResult,
    Fingerprint,
    Finished,
    Grow,
    Hello,
    Limit,
    Malformed,
    ModelCard,
    NewTokens,
    Ping,
    Plan,
    PlanSeq,
    PoolHandle,
    Refused,
    Report,
    RequestId,
    Role,
    Row,
    RowEnd,
    Sampling,
    SchedulerToClient,
    SchedulerToWorker,
    Start,
    Submit,
    Ticket,
    Welcome,
    WorkerId,
    WorkerRefused,
    WorkerToScheduler,
    decode_for_client,
    decode_for_worker,
    encode,
    pack_ids,
)
from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens
from tidegate.scheduler.core import Core
from tidegate.scheduler.link import SendOutcome
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.shell import BEHIND_FRAME_COUNT, Shell, ShellSettings

CLIENT = b"client"
B = WorkerId("b")
LAYOUT = Layout(
    (Group("full", All(), Tokens(4), (TensorSpec("k", 0, (1,), "float32"),)),), None
)
CARD = ModelCard("tiny", "llama", 100, 64, b"{}", None, None, False, (1,))


class MemoryLink:
    """A link whose peers are lists."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[tuple[bytes, bytes]](1000)
        self.sent: dict[bytes, deque[bytes]] = {}
        self.outcome: dict[bytes, SendOutcome] = {}
        self.gone: list[bytes] = []
        self.waiting: dict[bytes, int] = {}

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """All that are there, one at least."""
        frames = [await self._receive.receive()]
        while self._receive.statistics().current_buffer_used:
            frames.append(self._receive.receive_nowait())
        return frames

    def send(self, peer: bytes, frame: bytes) -> SendOutcome:
        outcome = self.outcome.get(peer, SendOutcome.SENT)
        if outcome is SendOutcome.SENT:
            self.sent.setdefault(peer, deque()).append(frame)
        return outcome

    def waiting_count(self, peer: bytes) -> int:
        return self.waiting.get(peer, 0)

    def take_gone(self) -> list[bytes]:
        gone, self.gone = self.gone, []
        return gone

    def put(self, peer: bytes, message: ClientToScheduler | WorkerToScheduler) -> None:
        self._send.send_nowait((peer, encode(message)))

    def put_raw(self, peer: bytes, frame: bytes) -> None:
        self._send.send_nowait((peer, frame))


class Bench:
    """A shell under test, with its two links."""

    def __init__(self, log: Log, settings: CoreSettings | None = None) -> None:
        self.workers, self.clients = MemoryLink(), MemoryLink()
        self.core = Core(settings or CoreSettings(chunk_tokens=Tokens(8)))
        self.shell = Shell(
            self.core,
            self.workers,
            self.clients,
            log,
            ShellSettings(),
            "epoch",
            random.Random(0),
            b"secret",
        )

    def join(self, name: str, role: Role, **changes: str) -> None:
        self.workers.put(name.encode(), hello(name, role, **changes))

    def submit(self, name: str, prompt: list[int], max_tokens: int | None = 4) -> None:
        sampling = Sampling()
        submit = Submit(RequestId(name), "", pack_ids(prompt), max_tokens, sampling, 7)
        self.clients.put(CLIENT, submit)

    def to_worker(self, name: str) -> list[SchedulerToWorker]:
        frames = self.workers.sent.pop(name.encode(), deque())
        return [decode_for_worker(frame) for frame in frames]

    def plans(self, name: str) -> list[Plan]:
        return [message for message in self.to_worker(name) if isinstance(message, Plan)]

    def to_client(self) -> list[SchedulerToClient]:
        frames = self.clients.sent.pop(CLIENT, deque())
        messages = [decode_for_client(frame) for frame in frames]
        return [message for message in messages if not isinstance(message, Ping)]


def hello(name: str, role: Role, dtype: str = "float32", model: str = "m") -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        WorkerId(name),
        role,
        1,
        Fingerprint(model, dtype, LAYOUT),
        CARD,
        PoolHandle("shared_memory", "1:2", 0, (8,)),
        4,
    )


def report(
    plan: Plan,
    *,
    tokens: dict[int, list[int]] | None = None,
    ended: tuple[RowEnd, ...] = (),
    chunks: tuple[ChunkDone, ...] = (),
    fetched: tuple[FetchResult, ...] = (),
) -> Report:
    sampled = tokens or {}
    return Report(
        plan.seq,
        plan.seq,
        0,
        pack_ids(sampled),
        pack_ids(len(ids) for ids in sampled.values()),
        b"".join(pack_ids(ids) for ids in sampled.values()),
        ended,
        chunks,
        fetched,
        b"",
        0,
    )


async def test_a_request_is_prefilled_handed_over_and_decoded(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("p", Role.PREFILL)
        bench.join("d", Role.DECODE)
        await trio.sleep(0.1)
        assert isinstance(bench.to_worker("p")[0], Welcome)
        assert isinstance(bench.to_worker("d")[0], Welcome)

        bench.submit("a", [5, 6, 7, 8, 9])
        await trio.sleep(0.1)
        (plan,) = bench.plans("p")
        start, chunk = plan.operations
        assert isinstance(start, Start)
        assert start.tokens == pack_ids([5, 6, 7, 8, 9])
        assert start.sampling.seed == 7
        assert chunk == Chunk(Row(0), 5, True)
        (accepted,) = bench.to_client()
        assert isinstance(accepted, Accepted)
        assert accepted.max_tokens == 4

        bench.workers.put(
            b"p",
            report(
                plan,
                tokens={0: [42]},
                ended=(RowEnd(Row(0), EndReason.LENGTH),),
                chunks=(ChunkDone(Row(0), 5),),
            ),
        )
        await trio.sleep(0.1)
        (tokens,) = bench.to_client()
        assert tokens == NewTokens(
            pack_ids([accepted.stream]), pack_ids([0]), pack_ids([1]), pack_ids([42])
        )
        plan = bench.plans("d")[-1]
        assert isinstance(plan.operations[0], Fetch)

        result = FetchResult(Ticket(1), "", 160, 1)
        bench.workers.put(b"d", report(plan, fetched=(result,)))
        await trio.sleep(0.1)
        (plan,) = bench.plans("d")
        (start,) = plan.operations
        assert isinstance(start, Start)
        assert (start.position, start.output_index, start.limit) == (5, 1, 8)
        assert start.tokens == pack_ids([42])

        ended = (RowEnd(Row(0), EndReason.LENGTH),)
        bench.workers.put(b"d", report(plan, tokens={0: [43, 44, 45]}, ended=ended))
        await trio.sleep(0.1)
        tokens, finished = bench.to_client()
        assert isinstance(tokens, NewTokens)
        assert tokens.tokens == pack_ids([43, 44, 45])
        assert tokens.first_indexes == pack_ids([1])
        assert isinstance(finished, Finished)
        assert finished.reason is EndReason.LENGTH
        assert finished.usage.output_tokens == 4
        nursery.cancel_scope.cancel()


async def test_a_silent_worker_is_closed_and_its_requests_end(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("p", Role.PREFILL)
        await trio.sleep(0.1)
        bench.submit("a", [5], max_tokens=1)
        await trio.sleep(125)
        messages = bench.to_client()
        assert isinstance(messages[-1], Finished)
        assert messages[-1].status == 503
        assert isinstance(bench.to_worker("p")[-1], WorkerRefused)
        nursery.cancel_scope.cancel()


async def test_a_worker_whose_report_cannot_be_is_closed(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        for index, lists in enumerate([((1, 1), (1, 1), (5, 6)), ((4,), (1,), (5,))]):
            name = f"p{index}"
            bench.join(name, Role.PREFILL)
            await trio.sleep(0.1)
            bench.to_worker(name)
            rows, counts, tokens = map(pack_ids, lists)
            none = PlanSeq(0)
            bench.workers.put(
                name.encode(), Report(none, none, 1, rows, counts, tokens, (), (), (), b"", 0)
            )
            await trio.sleep(0.1)
            (refused,) = bench.to_worker(name)
            assert isinstance(refused, WorkerRefused)
            assert "row" in refused.reason and not bench.core.fleet.workers
        nursery.cancel_scope.cancel()


async def test_each_connection_gets_its_tokens_of_all_reports_of_a_turn_in_one_frame(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("b", Role.BOTH)
        await trio.sleep(0.1)
        bench.to_worker("b")
        clients = [b"one", b"two", b"one"]
        for index, client in enumerate(clients):
            name, prompt = RequestId(f"r{index}"), pack_ids([5])
            bench.clients.put(client, Submit(name, "", prompt, 5, Sampling(), 7))
            await trio.sleep(0.1)
        seq = PlanSeq(0)
        while plans := bench.plans("b"):
            for plan in plans:
                seq = plan.seq
                chunks = [each for each in plan.operations if isinstance(each, Chunk)]
                done = tuple(ChunkDone(each.row, each.until) for each in chunks)
                tokens = {int(each.row): [10 * each.row] for each in chunks}
                bench.workers.put(b"b", report(plan, chunks=done, tokens=tokens))
            await trio.sleep(0.1)
        last_plan = Plan(seq, ())
        before = {peer: len(bench.clients.sent[peer]) for peer in (b"one", b"two")}
        bench.workers.put(b"b", report(last_plan, tokens={2: [22, 23], 0: [2], 1: [12]}))
        bench.workers.put(b"b", report(last_plan, tokens={0: [3], 2: [24]}))
        await trio.sleep(0.1)
        frames = {
            peer: [decode_for_client(frame) for frame in list(bench.clients.sent[peer])[count:]]
            for peer, count in before.items()
        }
        nursery.cancel_scope.cancel()
    ones = NewTokens(
        pack_ids([3, 1, 1, 3]),
        pack_ids([1, 1, 2, 3]),
        pack_ids([2, 1, 1, 1]),
        pack_ids([22, 23, 2, 3, 24]),
    )
    assert frames[b"one"] == [ones]
    twos = NewTokens(pack_ids([2]), pack_ids([1]), pack_ids([1]), pack_ids([12]))
    assert frames[b"two"] == [twos]


async def test_a_worker_of_another_dtype_is_refused_with_both_values(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("p", Role.PREFILL)
        bench.join("d", Role.DECODE, dtype="bfloat16")
        await trio.sleep(0.1)
        (refused,) = bench.to_worker("d")
        assert isinstance(refused, WorkerRefused)
        assert "float32" in refused.reason
        assert "bfloat16" in refused.reason
        nursery.cancel_scope.cancel()


async def test_bad_requests_are_refused_and_the_next_good_one_runs(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("p", Role.PREFILL)
        await trio.sleep(0.1)
        bench.submit("vocabulary", [3, 100], max_tokens=1)
        bench.submit("empty", [], max_tokens=1)
        bench.submit("zero", [3], max_tokens=0)
        bench.submit("decode", [3], max_tokens=2)
        bench.submit("pool", [3] * 33, max_tokens=1)
        bench.clients.put_raw(CLIENT, b"\x00garbage")
        bench.workers.put_raw(b"stranger", b"\x00garbage")
        await trio.sleep(0.1)
        answers = bench.to_client()
        refused = {a.request_id: a for a in answers if isinstance(a, Refused)}
        assert {name: r.status for name, r in refused.items()} == {
            "vocabulary": 400,
            "empty": 400,
            "zero": 400,
            "decode": 503,
            "pool": 400,
        }
        assert (refused[RequestId("pool")].pool, refused[RequestId("pool")].limit) == (
            "full",
            8,
        )
        assert any(isinstance(answer, Malformed) for answer in answers)
        bench.submit("good", [3], max_tokens=1)
        await trio.sleep(0.1)
        assert isinstance(bench.to_client()[-1], Accepted)
        nursery.cancel_scope.cancel()


async def test_a_client_that_is_gone_or_too_slow_loses_its_requests(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("p", Role.PREFILL)
        await trio.sleep(0.1)
        for outcome in (SendOutcome.GONE, SendOutcome.FULL):
            bench.submit(outcome.name, [3], max_tokens=1)
            await trio.sleep(0.1)
            assert bench.core.fleet.requests
            bench.clients.outcome[CLIENT] = outcome
            await trio.sleep(2)  # The next ping finds it out.
            assert not bench.core.fleet.requests
            bench.clients.outcome.clear()
        nursery.cancel_scope.cancel()


async def test_rows_of_a_client_that_does_not_keep_up_sit_out_until_it_has(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("b", Role.BOTH)
        await trio.sleep(0.1)
        bench.to_worker("b")
        bench.submit("a", [3], max_tokens=20)
        await trio.sleep(0.1)
        (plan,) = bench.plans("b")
        bench.clients.waiting[CLIENT] = BEHIND_FRAME_COUNT - 1
        done = (ChunkDone(Row(0), 1),)
        bench.workers.put(b"b", report(plan, chunks=done, tokens={0: [5]}))
        await trio.sleep(0.1)
        (plan,) = bench.plans("b")
        assert [type(operation) for operation in plan.operations] == [Grow]
        bench.clients.waiting[CLIENT] += 1
        bench.workers.put(b"b", report(plan, tokens={0: [6]}))
        await trio.sleep(0.1)
        (plan,) = bench.plans("b")
        assert plan.operations == (Limit(Row(0), 0),)
        # As long as a frame waits for it, it has not caught up.
        bench.clients.waiting[CLIENT] = 1
        await trio.sleep(0.1)
        assert bench.plans("b") == []
        bench.clients.waiting.clear()
        await trio.sleep(0.1)
        (plan,) = bench.plans("b")
        assert plan.operations == (Limit(Row(0), 20),)
        nursery.cancel_scope.cancel()


async def test_a_request_cancelled_as_it_begins_sends_no_start(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("p", Role.PREFILL)
        await trio.sleep(0.1)
        bench.to_worker("p")
        bench.submit("a", [3], max_tokens=1)
        bench.clients.put(CLIENT, Cancel(RequestId("a"), 0, EndReason.CANCELLED))
        await trio.sleep(0.1)
        finished = bench.to_client()[-1]
        assert isinstance(finished, Finished)
        assert finished.reason is EndReason.CANCELLED
        bench.core.check()
        nursery.cancel_scope.cancel()


async def test_tenants_and_salts_share_nothing_and_equals_share_all_full_pages(
    log: Log, autojump_clock: trio.testing.MockClock
) -> None:
    bench = Bench(log, CoreSettings(chunk_tokens=None))
    prompt = list(range(10))
    starts: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.shell.run)
        bench.join("b", Role.BOTH)
        await trio.sleep(0.1)
        bench.to_worker("b")
        askers = (("a", ""), ("ax", ""), ("a", "x"), ("a", ""), ("a", "x"))
        for number, (tenant, salt) in enumerate(askers):
            submit = Submit(
                RequestId(str(number)),
                "",
                pack_ids(prompt),
                1,
                Sampling(),
                7,
                tenant=tenant,
                cache_salt=salt,
            )
            bench.clients.put(CLIENT, submit)
            await trio.sleep(0.1)
            (plan,) = bench.plans("b")
            (start,) = [each for each in plan.operations if isinstance(each, Start)]
            starts.append(start.position)
            assert start.tokens == pack_ids(prompt[start.position :])
            row = start.row
            ended = (RowEnd(row, EndReason.LENGTH),)
            done = report(plan, tokens={row: [3]}, ended=ended, chunks=(ChunkDone(row, 10),))
            bench.workers.put(b"b", done)
            await trio.sleep(0.1)
            for last in bench.plans("b"):
                bench.workers.put(b"b", report(last))
        nursery.cancel_scope.cancel()
    assert starts == [0, 0, 0, 8, 8]
