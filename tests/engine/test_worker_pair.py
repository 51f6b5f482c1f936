"""A prefill and a decode process over a real socket, driven by a script."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.scripted_scheduler import ScriptedScheduler
from fakes.worker_process import (
    KV_MEMORY,
    WorkerProcess,
    ends,
    prompt_of,
    settings_of,
    start_of,
)
from oracle.make_tiny_checkpoint import VOCAB_SIZE, make_tiny_checkpoint
from tidegate.engine.loading import LoadedEngine, load_engine
from tidegate.engine.rows import RowTable
from tidegate.engine.runner import Runner
from tidegate.engine.settings import WorkerSettings
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
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
    pack_ids,
    unpack_ids,
)
from tidegate.kvcache.layout import Group, Layout, Tokens

PREFILL, DECODE = WorkerId("prefill-0"), WorkerId("decode-0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "gemma3")


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
        values = iter(unpack_ids(report.tokens))
        counts = zip(unpack_ids(report.rows), unpack_ids(report.counts), strict=True)
        for one, count in counts:
            sampled = list(islice(values, count))
            tokens += sampled if one == row else []
        assert not list(values), "tokens of no row"
    return tokens


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
    scheduler.reports_until(PREFILL, lambda report: bool(tokens_of([report], 4)))
    seq = scheduler.plan(PREFILL, Stop(Row(4)))
    scheduler.reports_until(PREFILL, lambda report: report.completed == seq)
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
