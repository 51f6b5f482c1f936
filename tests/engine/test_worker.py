"""Real worker processes over a real socket, driven by a scheduler that follows a script."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pytest

from fakes.scripted_scheduler import ScriptedScheduler
from oracle.make_tiny_checkpoint import VOCAB_SIZE, make_tiny_checkpoint
from tidegate.engine.loading import LoadedEngine, load_engine
from tidegate.engine.rows import RowTable
from tidegate.engine.runner import Runner
from tidegate.engine.settings import WorkerSettings
from tidegate.engine.worker import STATUS_FAILED, run_worker
from tidegate.ipc.lifeline import LIFELINE_STATUS
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
    Goodbye,
    Grow,
    Hello,
    Incarnation,
    PageRun,
    Peer,
    PoolId,
    PullGroup,
    Report,
    RequestId,
    Role,
    Row,
    RowEnd,
    Sampling,
    Start,
    Stop,
    Ticket,
    WorkerId,
    WorkerRefused,
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.layout import Group, Layout, Tokens

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")
PAGE = 8
KV_MEMORY = 8 * 2**20
STOP_S_MAX = 1.0


class WorkerProcess:
    """A worker started from `settings`, with its standard error kept."""

    def __init__(self, settings: WorkerSettings, *, pass_fds: Sequence[int] = ()) -> None:
        script = Path(__file__).parents[1] / "fakes" / "start_worker.py"
        self.process = subprocess.Popen(
            [sys.executable, script, msgspec.json.encode(settings, enc_hook=str)],
            stderr=subprocess.PIPE,
            pass_fds=pass_fds,
        )

    def finish(self, timeout_s: float = 60) -> tuple[int, str]:
        """Wait for its end: the exit status and what it wrote."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")


def settings_of(
    checkpoint: Path, name: WorkerId, endpoint: str, role: Role, log: Path | None = None
) -> WorkerSettings:
    return WorkerSettings(
        model=str(checkpoint),
        role=role,
        name=name,
        endpoint=endpoint,
        dtype="float32",
        page_tokens=PAGE,
        kv_memory=KV_MEMORY,
        max_running=8,
        threads=1,
        log=log,
    )


class Fleet:
    """A prefill and a decode worker that have joined a scripted scheduler."""

    def __init__(self, scheduler: ScriptedScheduler, log: Path) -> None:
        self.scheduler = scheduler
        self.log = log
        self.hellos: dict[WorkerId, Hello] = {}

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    @property
    def layout(self) -> Layout:
        return self.hellos[PREFILL].fingerprint.layout


@pytest.fixture(scope="module")
def fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("run")
    with ScriptedScheduler(folder) as scheduler:
        fleet = Fleet(scheduler, folder / "log.jsonl")

        def settings(name: WorkerId, role: Role) -> WorkerSettings:
            return settings_of(checkpoint, name, scheduler.endpoint, role, fleet.log)

        with (
            WorkerProcess(settings(PREFILL, Role.PREFILL)) as prefill,
            WorkerProcess(settings(DECODE, Role.DECODE)) as decode,
        ):
            for name in (PREFILL, DECODE):
                fleet.hellos[name] = scheduler.welcome(name)
            handle = fleet.hellos[PREFILL].handle
            scheduler.plan(DECODE, Peer(PoolId(PREFILL), Incarnation(1), handle))
            yield fleet
            assert prefill.process.poll() is None
            assert decode.process.poll() is None


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> LoadedEngine:
    """The same model in this process."""
    settings = settings_of(checkpoint, WorkerId("here"), "", Role.BOTH)
    return load_engine(settings, lambda text: None)


def prompt_of(length: int) -> list[int]:
    return [10 + (7 * i * i + 3 * i) % (VOCAB_SIZE - 10) for i in range(length)]


def runs(layout: Layout, ids_from: int, positions: int) -> tuple[PageRun, ...]:
    """Pages from `ids_from` on in every group, for positions [0, `positions`)."""
    return tuple(
        PageRun(0, pack_ids(range(ids_from, ids_from + group.pages(Tokens(positions)))))
        for group in layout.groups
    )


def start_of(
    layout: Layout,
    row: int,
    prompt: Sequence[int],
    limit: int,
    ids_from: int,
    sampling: Sampling | None = None,
) -> Start:
    return Start(
        Row(row),
        RequestId(f"request-{row}"),
        0,
        pack_ids(prompt),
        0,
        limit,
        runs(layout, ids_from, limit),
        sampling or Sampling(),
        b"",
        ignore_eos=True,
    )


def expected_tokens(
    engine: LoadedEngine, prompt: Sequence[int], new: int, sampling: Sampling
) -> list[int]:
    """What one worker alone would give."""
    counts = engine.pools.page_counts
    table = RowTable(engine.layout, counts, 1, engine.card.vocab_size, engine.card.eos_ids)
    limit = len(prompt) + new - 1
    table.apply(start_of(engine.layout, 0, prompt, limit, 0, sampling))
    table.apply(Chunk(Row(0), len(prompt), True))
    runner = Runner(engine.model, engine.store, table)
    tokens: list[int] = []
    while len(table):
        tokens += runner.launch().tokens
    return tokens


def tokens_of(reports: Sequence[Report], row: int) -> list[int]:
    tokens: list[int] = []
    for report in reports:
        rows, values = unpack_ids(report.rows), unpack_ids(report.tokens)
        tokens += [value for r, value in zip(rows, values, strict=True) if r == row]
    return tokens


def ends(report: Report, row: int) -> bool:
    return any(end.row == row for end in report.ended)


def pull(group: Group, length: int, source_from: int, target_from: int) -> PullGroup:
    first = group.page_of(group.first_needed(Tokens(length)))
    count = group.pages(Tokens(length)) - first
    return PullGroup(
        group.start_of(first),
        pack_ids(range(source_from + first, source_from + first + count)),
        pack_ids(range(target_from, target_from + count)),
    )


def test_a_worker_says_what_it_is(fleet: Fleet, engine: LoadedEngine) -> None:
    hello = fleet.hellos[PREFILL]
    assert (hello.role, hello.row_count_max) == (Role.PREFILL, 8)
    assert hello.fingerprint == fleet.hellos[DECODE].fingerprint == engine.fingerprint
    assert hello.card == engine.card
    assert hello.card.vocab_size == VOCAB_SIZE
    assert [group.name for group in hello.fingerprint.layout.groups] == ["full", "window"]
    assert 0 < hello.handle.byte_count <= KV_MEMORY
    assert hello.handle.address.startswith(f"{hello.pid}:")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=11)])
def test_a_prompt_prefilled_on_one_process_decodes_on_the_other(
    fleet: Fleet, engine: LoadedEngine, sampling: Sampling
) -> None:
    scheduler, layout = fleet.scheduler, fleet.layout
    length, new = 70, 20
    prompt = prompt_of(length)
    scheduler.plan(
        PREFILL,
        start_of(layout, 2, prompt, length, 3, sampling),
        Chunk(Row(2), 40, False),
        Chunk(Row(2), length, True),
    )
    reports = scheduler.reports_until(PREFILL, lambda report: ends(report, 2))
    chunks = [chunk.until for report in reports for chunk in report.chunks]
    assert chunks == [40, length]
    assert reports[-1].ended == (RowEnd(Row(2), EndReason.LENGTH),)
    first_token = tokens_of(reports, 2)
    assert len(first_token) == 1

    pulls = tuple(pull(group, length, 3, 20) for group in layout.groups)
    fetch = Fetch(
        Ticket(5), RequestId("request-2"), PoolId(PREFILL), Incarnation(1), pulls, length
    )
    scheduler.plan(DECODE, fetch)
    (result,) = scheduler.reports_until(DECODE, lambda report: report.fetched != ())[-1].fetched
    assert (result.ticket, result.error) == (5, "")
    moved = sum(
        group.page_bytes * (len(pulled.source_ids) // 4)
        for group, pulled in zip(layout.groups, pulls, strict=True)
    )
    assert result.byte_count == moved
    # The window of 32 reads from position 39 on: five of the nine pages.
    assert len(pulls[1].source_ids) // 4 == 5

    limit = length + new - 1
    page_runs = tuple(
        PageRun(
            pulled.first_position,
            pulled.target_ids
            + pack_ids(
                range(60, 60 + group.pages(Tokens(limit)) - group.pages(Tokens(length)))
            ),
        )
        for group, pulled in zip(layout.groups, pulls, strict=True)
    )
    scheduler.plan(
        DECODE,
        Start(
            Row(7),
            RequestId("request-2"),
            length,
            pack_ids(first_token),
            1,
            limit,
            page_runs,
            sampling,
            b"",
            ignore_eos=True,
        ),
    )
    reports = scheduler.reports_until(DECODE, lambda report: ends(report, 7))
    tokens = first_token + tokens_of(reports, 7)
    assert tokens == expected_tokens(engine, prompt, new, sampling)
    assert sampling.temperature == 0 or len(set(tokens)) > 4
    line = fleet.lines("fetch_done")[-1]
    assert (line["request_id"], line["bytes"], line["process"]) == (
        "request-2",
        moved,
        "decode-0",
    )


def test_garbage_costs_only_the_row_that_it_names(fleet: Fleet, engine: LoadedEngine) -> None:
    scheduler, layout = fleet.scheduler, fleet.layout
    prompt = prompt_of(20)
    bad = msgspec.structs.replace(start_of(layout, 1, prompt, 30, 30), pages=())
    seq = scheduler.plan(
        PREFILL,
        start_of(layout, 0, prompt, 29, 0),
        Chunk(Row(0), 20, True),
        bad,
        Chunk(Row(1), 20, True),
        Grow(Row(5), 77, b"x"),
        Stop(Row(700)),
    )
    fault = scheduler.fault_of(PREFILL)
    assert (fault.row, fault.request_id, fault.kind) == (1, "request-1", "bad_plan")
    reports = scheduler.reports_until(PREFILL, lambda report: ends(report, 0))
    assert reports[0].completed == seq
    assert tokens_of(reports, 0) == expected_tokens(engine, prompt, 10, Sampling())


def test_a_row_that_is_stopped_midway_says_nothing_more(fleet: Fleet) -> None:
    scheduler, layout = fleet.scheduler, fleet.layout
    start = start_of(layout, 4, prompt_of(10), 600, 0)
    scheduler.plan(PREFILL, start, Chunk(Row(4), 10, True))
    scheduler.reports_until(PREFILL, lambda report: len(tokens_of([report], 4)) == 1)
    seq = scheduler.plan(PREFILL, Stop(Row(4)))
    reports = scheduler.reports_until(PREFILL, lambda report: report.completed == seq)
    assert tokens_of(reports[-1:], 4) == []
    # The next one is a sign of life, half a second later.
    begin = time.monotonic()
    silence = scheduler.next_of(PREFILL)
    assert isinstance(silence, Report)
    assert (silence.rows, silence.completed) == (b"", seq)
    assert time.monotonic() - begin > 0.2


def test_an_idle_worker_uses_no_processor_time(fleet: Fleet) -> None:
    pid = fleet.hellos[DECODE].pid

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    time.sleep(1.0)
    assert cpu_s() - before < 0.1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_within_a_second_in_the_middle_of_work(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    name = WorkerId("both-0")
    log = tmp_path / "log.jsonl"
    with (
        ScriptedScheduler(tmp_path) as scheduler,
        WorkerProcess(
            settings_of(checkpoint, name, scheduler.endpoint, Role.BOTH, log)
        ) as worker,
    ):
        layout = scheduler.welcome(name).fingerprint.layout
        scheduler.plan(
            name, start_of(layout, 0, prompt_of(10), 1300, 0), Chunk(Row(0), 10, True)
        )
        scheduler.reports_until(name, lambda report: report.launch == 3)
        begin = time.monotonic()
        worker.process.send_signal(number)
        assert scheduler.goodbye_of(name) == Goodbye(number.name)
        status, errors = worker.finish()
        assert time.monotonic() - begin < STOP_S_MAX
    assert status == 0
    assert "Traceback" not in errors
    assert "loaded in" in errors
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("process_stopped", 0)


def test_a_worker_that_is_refused_exits_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    name = WorkerId("decode-7")
    with (
        ScriptedScheduler(tmp_path) as scheduler,
        WorkerProcess(
            settings_of(checkpoint, name, scheduler.endpoint, Role.DECODE, tmp_path / "log")
        ) as worker,
    ):
        scheduler.hello_of(name)
        scheduler.send(name, WorkerRefused("it serves another model"))
        status, errors = worker.finish()
    assert status == STATUS_FAILED
    assert "decode-7: it serves another model" in errors
    assert "Traceback" not in errors


def test_a_worker_ends_when_its_scheduler_does(checkpoint: Path, tmp_path: Path) -> None:
    name = WorkerId("decode-0")
    scheduler = ScriptedScheduler(tmp_path)
    settings = settings_of(checkpoint, name, scheduler.endpoint, Role.DECODE, tmp_path / "log")
    with WorkerProcess(settings) as worker:
        with scheduler:
            scheduler.welcome(name)
            scheduler.plan(name)
            scheduler.reports_until(name, lambda report: report.applied == 1)
        status, errors = worker.finish(timeout_s=5)
    assert status == STATUS_FAILED
    assert "the connection to the scheduler was lost" in errors


def test_a_worker_ends_with_its_parent_while_it_waits(checkpoint: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    settings = settings_of(
        checkpoint, WorkerId("w"), f"ipc://{tmp_path}/none.sock", Role.BOTH, tmp_path / "log"
    )
    settings = msgspec.structs.replace(settings, lifeline_fd=read_end)
    with WorkerProcess(settings, pass_fds=[read_end]) as worker:
        os.close(read_end)
        assert worker.process.stderr is not None
        while b"waiting for the scheduler" not in worker.process.stderr.readline():
            assert worker.process.poll() is None
        os.close(write_end)
        assert worker.finish(timeout_s=5)[0] == LIFELINE_STATUS


def bad_settings(**changes: Any) -> WorkerSettings:
    settings = WorkerSettings(
        model="no-such-model",
        role=Role.BOTH,
        name=WorkerId("w"),
        endpoint="ipc:///tmp/none.sock",
        kv_memory=KV_MEMORY,
    )
    return msgspec.structs.replace(settings, **changes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (bad_settings(), "no-such-model is not a model's name"),
        (bad_settings(page_tokens=0), "--page-tokens must be at least 1, got 0"),
        (bad_settings(max_running=-1), "--max-running must be at least 1"),
        (bad_settings(log_level="loud"), "the log level is 'loud'"),
        (
            bad_settings(device="cuda", role=Role.PREFILL),
            "--role prefill with --device cuda: pages cannot be handed over",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(
    settings: WorkerSettings, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = msgspec.structs.replace(settings, log=tmp_path / "log")
    assert run_worker(settings) == STATUS_FAILED
    errors = capfd.readouterr().err
    assert errors.startswith("w: ")
    assert words in errors
    assert "Traceback" not in errors


def test_a_pool_that_holds_no_request_is_refused_with_what_would_do(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = bad_settings(model=str(checkpoint), kv_memory=10_000, log=tmp_path / "log")
    assert run_worker(settings) == STATUS_FAILED
    assert "--kv-memory: 10000 bytes do not hold one request" in capfd.readouterr().err
