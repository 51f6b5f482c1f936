"""Launches of tiny models: hand-off, chunking and batching change no token; faults stay put."""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch

from fakes.tiny_model import EOS_ID, VOCAB_SIZE, tiny_config, tiny_model
from tidegate.engine.batch import Batch
from tidegate.engine.models.registry import Model, layout_for
from tidegate.engine.rows import RowTable
from tidegate.engine.runner import LaunchResult, Runner
from tidegate.ipc.protocol import (
    Chunk,
    ChunkDone,
    EndReason,
    Fetch,
    Incarnation,
    PageRun,
    Peer,
    PoolId,
    PullGroup,
    RequestId,
    Row,
    RowEnd,
    Sampling,
    Start,
    Ticket,
    pack_ids,
)
from tidegate.ipc.transport.shared_memory import SharedMemoryTransport
from tidegate.kvcache.layout import Layout, Tokens
from tidegate.kvcache.page_store import PageStore

Family = Literal["llama", "gemma3"]
PAGE = 8
PAGE_COUNT = 120
FAMILIES: list[Family] = ["llama", "gemma3"]
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(0.8, 40, 0.9, 0.01, 6)]


class Engine:
    """A store, a row table and a runner, as in one worker, with poisoned pages throughout."""

    def __init__(
        self,
        family: Family,
        wrap: Callable[[Model], Model] = lambda model: model,
        device: str = "cpu",
    ) -> None:
        config = tiny_config(family)
        self.layout: Layout = layout_for(config, PAGE, "float32")
        counts = [PAGE_COUNT] * len(self.layout.groups)
        self.store = PageStore(self.layout, counts, device)
        for group in range(len(counts)):
            self.store.poison(group, range(PAGE_COUNT))
        self.table = RowTable(self.layout, counts, 16, VOCAB_SIZE, (EOS_ID,))
        self.runner = Runner(wrap(tiny_model(config, device=device)), self.store, self.table)
        self.tokens: dict[Row, list[int]] = {}
        self.ends: list[RowEnd] = []
        self.next_page = 0

    def take_pages(self, count: int) -> list[int]:
        """Page ids in an order that is not the positions'."""
        first, self.next_page = self.next_page, self.next_page + count
        assert self.next_page <= PAGE_COUNT
        return list(range(PAGE_COUNT - 1 - first, PAGE_COUNT - 1 - first - count, -1))

    def run(self) -> LaunchResult:
        result = self.runner.launch()
        for row, token in zip(result.rows, result.tokens, strict=True):
            self.tokens.setdefault(row, []).append(token)
        self.ends += result.ended
        return result

    def run_to_the_end(self, launch_count_max: int = 400) -> None:
        for _ in range(launch_count_max):
            if not self.run().row_count:
                return
        raise AssertionError("rows are still running")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 10_000 + length)
    return [int(t) for t in torch.randint(2, VOCAB_SIZE, (length,), generator=generator)]


def start_prompt(
    engine: Engine, row: int, prompt: Sequence[int], limit: int, sampling: Sampling
) -> tuple[list[int], ...]:
    """Start a row with pages for all positions up to its limit, the same for each group."""
    pages = tuple(
        engine.take_pages(group.pages(Tokens(limit))) for group in engine.layout.groups
    )
    engine.table.apply(
        Start(
            Row(row),
            RequestId(f"r{row}"),
            0,
            pack_ids(prompt),
            0,
            limit,
            tuple(PageRun(0, pack_ids(ids)) for ids in pages),
            sampling,
            b"",
            ignore_eos=True,
        )
    )
    return pages


def add_chunks(engine: Engine, row: int, length: int, chunk: int) -> None:
    for until in [*range(chunk, length, chunk), length]:
        engine.table.apply(Chunk(Row(row), until, until == length))


def run_alone(
    family: Family, prompt: list[int], new: int, sampling: Sampling, chunk: int = 10_000
) -> list[int]:
    engine = Engine(family)
    start_prompt(engine, 0, prompt, len(prompt) + new - 1, sampling)
    add_chunks(engine, 0, len(prompt), chunk)
    engine.run_to_the_end()
    assert engine.ends == [RowEnd(Row(0), EndReason.LENGTH)]
    assert len(engine.tokens[Row(0)]) == new
    return engine.tokens[Row(0)]


def hand_off(
    source: Engine, target: Engine, source_pages: Sequence[list[int]], length: int
) -> tuple[list[tuple[int, list[int]]], int]:
    """Pull what later positions read. Returns the runs on the target, and the bytes moved."""
    transport = SharedMemoryTransport(target.layout, target.store.geometry, target.store.buffer)
    transport.attach(Peer(PoolId("p"), Incarnation(1), source.store.handle()))
    runs: list[tuple[int, list[int]]] = []
    pulls: list[PullGroup] = []
    for group, ids in zip(source.layout.groups, source_pages, strict=True):
        first = group.page_of(group.first_needed(Tokens(length)))
        moved = ids[first : group.pages(Tokens(length))]
        own = target.take_pages(len(moved))
        runs.append((group.start_of(first), own))
        pulls.append(PullGroup(group.start_of(first), pack_ids(moved), pack_ids(own)))
    fetch = Fetch(Ticket(1), RequestId("r0"), PoolId("p"), Incarnation(1), tuple(pulls), length)
    result = transport.fetch(fetch)
    transport.close()
    assert result.error == ""
    return runs, result.byte_count


def run_on_two(
    family: Family, prompt: list[int], new: int, sampling: Sampling, chunk: int
) -> tuple[list[int], int]:
    """Prefill on one engine, hand over, decode on another."""
    length = len(prompt)
    source, target = Engine(family), Engine(family)
    pages = start_prompt(source, 0, prompt, length, sampling)
    add_chunks(source, 0, length, chunk)
    source.run_to_the_end()
    assert source.ends == [RowEnd(Row(0), EndReason.LENGTH)]
    first_token = source.tokens[Row(0)]
    runs, byte_count = hand_off(source, target, pages, length)
    limit = length + new - 1
    page_runs: list[PageRun] = []
    for group, (first_position, ids) in zip(target.layout.groups, runs, strict=True):
        held = group.page_of(Tokens(first_position)) + len(ids)
        grown = [*ids, *target.take_pages(group.pages(Tokens(limit)) - held)]
        page_runs.append(PageRun(first_position, pack_ids(grown)))
    target.table.apply(
        Start(
            Row(3),
            RequestId("r0"),
            length,
            pack_ids(first_token),
            1,
            limit,
            tuple(page_runs),
            sampling,
            b"",
            ignore_eos=True,
        )
    )
    target.run_to_the_end()
    return first_token + target.tokens[Row(3)], byte_count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 8, 31, 32, 33, 90])
def test_two_stores_with_a_hand_off_give_the_tokens_of_one(family: Family, length: int) -> None:
    prompt = prompt_of(length)
    for sampling in SAMPLINGS:
        together = run_alone(family, prompt, 40, sampling)
        split, _ = run_on_two(family, prompt, 40, sampling, chunk=16)
        assert split == together
        assert len(set(together)) > 5, "a text that repeats one token compares nothing"


def test_a_hand_off_moves_only_the_window_of_window_layers() -> None:
    _, byte_count = run_on_two("gemma3", prompt_of(100), 2, Sampling(), chunk=50)
    full, window = Engine("gemma3").layout.groups
    # Positions 69 to 99 lie in pages 8 to 12.
    assert byte_count == 13 * full.page_bytes + 5 * window.page_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_any_size_give_the_same_tokens(family: Family) -> None:
    prompt = prompt_of(75)
    whole = run_alone(family, prompt, 12, SAMPLINGS[1])
    for chunk in (2, 7, 8, 33, 74):
        assert run_alone(family, prompt, 12, SAMPLINGS[1], chunk) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_gives_the_same_tokens_in_mixed_company(family: Family) -> None:
    engine = Engine(family)
    lengths = [3, 40, 17, 64]
    for row, length in enumerate(lengths):
        limit = length + 9
        start_prompt(engine, row, prompt_of(length), limit, SAMPLINGS[row % 3])
    # Rows join one after another, so that launches mix chunks with rows that decode.
    for row, length in enumerate(lengths):
        add_chunks(engine, row, length, 16)
        engine.run()
    engine.run_to_the_end()
    for row, length in enumerate(lengths):
        alone = run_alone(family, prompt_of(length), 10, SAMPLINGS[row % 3])
        assert engine.tokens[Row(row)] == alone


def test_a_launch_says_what_it_did() -> None:
    engine = Engine("llama")
    start_prompt(engine, 2, prompt_of(10), 11, Sampling())
    add_chunks(engine, 2, 10, 6)
    first, second, third, fourth = (engine.run() for _ in range(4))
    assert (first.chunks, first.rows, first.token_count) == ((ChunkDone(Row(2), 6),), (), 6)
    assert (second.chunks, second.rows) == ((ChunkDone(Row(2), 10),), (Row(2),))
    assert (third.chunks, third.rows, third.row_count) == ((), (Row(2),), 1)
    assert third.ended == (RowEnd(Row(2), EndReason.LENGTH),)
    assert third.busy_us > 0
    assert (fourth.row_count, fourth.token_count, fourth.ended) == (0, 0, ())


class Saboteur:
    """A model that fails, or gives NaN, whenever a launch holds some token."""

    def __init__(self, model: Model, bad_token: int, *, gives_nan: bool) -> None:
        self._model = model
        self._bad_token = bad_token
        self._gives_nan = gives_nan
        self.launch_count = 0

    def forward(self, batch: Batch, store: PageStore) -> torch.Tensor:
        self.launch_count += 1
        bad = batch.tokens == self._bad_token
        logits = self._model.forward(batch, store)
        if self._gives_nan:
            return logits.where(~bad[batch.sample_rows, None], torch.nan)
        if bool(bad.any()):
            raise RuntimeError("out of luck\nmore lines")
        return logits


@pytest.mark.parametrize("gives_nan", [False, True])
def test_a_row_that_fails_gets_a_fault_and_the_others_go_on(gives_nan: bool) -> None:
    bad_token = 0
    engine = Engine("llama", lambda model: Saboteur(model, bad_token, gives_nan=gives_nan))
    start_prompt(engine, 0, prompt_of(9), 20, Sampling())
    start_prompt(engine, 1, [*prompt_of(5), bad_token], 20, Sampling())
    start_prompt(engine, 2, prompt_of(4), 20, Sampling())
    for row, length in enumerate([9, 6, 4]):
        add_chunks(engine, row, length, 100)
    result = engine.run()
    (fault,) = engine.table.take_faults()
    assert (fault.row, fault.request_id) == (1, "r1")
    if gives_nan:
        assert fault.kind == "logits_not_finite"
    else:
        assert (fault.kind, fault.text) == ("model_failed", "RuntimeError: out of luck")
    assert result.rows == (0, 2)
    assert result.chunks == (ChunkDone(Row(0), 9), ChunkDone(Row(2), 4))
    engine.run_to_the_end()
    expected = run_alone("llama", prompt_of(9), 12, Sampling())
    assert engine.tokens[Row(0)] == expected
    assert Row(1) not in engine.table


def test_a_launch_that_fails_runs_each_of_its_rows_alone_just_once() -> None:
    saboteurs: list[Saboteur] = []

    def wrap(model: Model) -> Model:
        saboteurs.append(Saboteur(model, 0, gives_nan=False))
        return saboteurs[0]

    engine = Engine("llama", wrap)
    for row in range(3):
        start_prompt(engine, row, [0, 5], 8, Sampling())
        add_chunks(engine, row, 2, 10)
    result = engine.run()
    assert saboteurs[0].launch_count == 4
    assert (result.rows, result.chunks) == ((), ())
    assert len(engine.table.take_faults()) == 3
    assert len(engine.table) == 0


def test_a_page_that_was_freed_too_early_shows_as_a_fault_of_its_row_alone() -> None:
    engine = Engine("gemma3")
    pages = start_prompt(engine, 0, prompt_of(20), 40, Sampling())
    start_prompt(engine, 1, prompt_of(20), 40, Sampling())
    for row in range(2):
        add_chunks(engine, row, 20, 100)
    engine.run()
    engine.store.poison(0, [pages[0][0]])
    assert engine.run().rows == (1,)
    assert [fault.row for fault in engine.table.take_faults()] == [0]


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_the_tokens_of_the_cpu(family: Family) -> None:
    prompt = prompt_of(90)
    for sampling in SAMPLINGS:
        engine = Engine(family, device="cuda")
        start_prompt(engine, 0, prompt, 109, sampling)
        add_chunks(engine, 0, 90, 16)
        engine.run_to_the_end()
        assert engine.tokens[Row(0)] == run_alone(family, prompt, 20, sampling)


def test_own_pools_are_reached_as_other_processes_reach_them() -> None:
    assert Engine("llama").store.handle().address.startswith(f"{os.getpid()}:")
