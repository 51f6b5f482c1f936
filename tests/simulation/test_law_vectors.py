"""The law on requests whose figures are known: most are from servers that got them wrong."""

from collections.abc import Sequence

import msgspec
import pytest

from simulation.instant import InstantFleet
from simulation.known_layouts import layout_of, window
from simulation.law import Case, Door, Trial, near
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Chunk, EndReason, Role
from tidegate.kvcache.layout import All, Layout
from tidegate.scheduler.commands import FinishRequest, Record, SendPlan, StartRow

PAIR = (Role.PREFILL, Role.DECODE)


def hybrid(tokens: int, page_tokens: int, *, flag: bool = True) -> Layout:
    groups = (("full", All()), ("window", window(tokens)))
    return layout_of(groups, (page_tokens, page_tokens), flag)


def pair(layout: Layout, counts: Sequence[int], chunk: int | None = 512) -> Case:
    """Two workers with the same pools."""
    return Case(layout=layout, pools=tuple((role, tuple(counts)) for role in PAIR), chunk=chunk)


class Traced:
    """A fleet whose commands are kept."""

    def __init__(self, case: Case) -> None:
        self.items: list[object] = []
        self.fleet = InstantFleet(
            case.layout, case.pools, case.settings, trace=self.items.append
        )

    def finished(self) -> list[Record]:
        return [
            item
            for item in self.items
            if isinstance(item, Record) and item.event is LogEvent.REQUEST_FINISHED
        ]

    def plans(self, worker: str) -> list[SendPlan]:
        return [
            item for item in self.items if isinstance(item, SendPlan) and item.worker == worker
        ]


# --- 212,224 positions in the full pool, 20,992 in that of a window of 128 ---

FULL, WINDOW, PAGE = 212_224, 20_992, 256
COUNTS = (FULL // PAGE, WINDOW // PAGE)


def long_prompts(flag: bool, chunk: int | None = 8192) -> Case:
    return pair(hybrid(128, PAGE, flag=flag), COUNTS, chunk)


def longest_prompt(flag: bool, output: int) -> int:
    """What is to be accepted: with the flag false the window pool is a limit too, where there
    is a hand-off."""
    return WINDOW if output > 1 and not flag else FULL - output + 1


def check_door(flag: bool, output: int, prompts: Sequence[int]) -> None:
    door, last = Door(long_prompts(flag)), longest_prompt(flag, output)
    limit = ("full", COUNTS[0]) if last > WINDOW else ("window", COUNTS[1])
    for prompt in prompts:
        refusal = door.refusal(prompt, output)
        assert (refusal is None) == (prompt <= last)
        assert refusal is None or (refusal.pool, refusal.limit) == limit


@pytest.mark.parametrize("output", [1, 2])
@pytest.mark.parametrize("flag", [True, False])
def test_prompts_are_accepted_up_to_the_pool_that_limits(flag: bool, output: int) -> None:
    edges = [1, 128, *range(0, FULL + PAGE, PAGE)]
    check_door(flag, output, near(edges, FULL + PAGE))


@pytest.mark.slow
@pytest.mark.parametrize("output", [1, 2])
@pytest.mark.parametrize("flag", [True, False])
def test_so_it_is_at_every_length(flag: bool, output: int) -> None:
    check_door(flag, output, range(1, FULL + PAGE))


def check_runs(flag: bool, chunk: int | None, prompts: Sequence[int]) -> None:
    """What is accepted runs to its end, and the other way round."""
    trial = Trial(long_prompts(flag, chunk))
    for output in (1, 2):
        for prompt in prompts:
            accepted = trial.check(prompt, output)
            assert accepted == (prompt <= longest_prompt(flag, output))
    trial.end()


@pytest.mark.parametrize("flag", [True, False])
def test_long_prompts_run_to_their_end(flag: bool) -> None:
    check_runs(flag, 8192, [1, 257, *near([WINDOW], FULL), 100_000, *near([FULL], FULL + 2)])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 512, 8192, 8193])
@pytest.mark.parametrize("flag", [True, False])
def test_so_they_do_near_edges_of_chunks_and_of_some_pages(
    flag: bool, chunk: int | None
) -> None:
    edges = [PAGE, 128, 8192, 8193, 2 * 8192, WINDOW, WINDOW + PAGE, FULL - PAGE, FULL]
    check_runs(flag, chunk, [*near(edges, FULL + 2), *range(1000, FULL, 20_011)])


# --- Pages that a window takes while it decodes ---


@pytest.mark.parametrize(
    ("tokens", "page_tokens", "pages"),
    [(512, 16, 33), (128, 256, 2), (129, 128, 2), (32, 1, 32)],
)
def test_a_window_decodes_in_as_many_pages_as_any_query_reads(
    tokens: int, page_tokens: int, pages: int
) -> None:
    """Of which one less refuses what is long, and nothing that is not."""
    layout = hybrid(tokens, page_tokens)
    prompt, output = 2 * tokens + 100, tokens
    full = -(-(prompt + output) // page_tokens)
    traced = Traced(pair(layout, (full, pages)))
    answer = traced.fleet.run(prompt, output)
    assert isinstance(answer, FinishRequest) and answer.reason is EndReason.LENGTH
    assert traced.finished()[0].fields["pages_window_peak"] == pages
    small = Trial(pair(layout, (full, pages - 1)))
    refusal = Door(small.case).refusal(prompt, output)
    assert refusal is not None
    assert (refusal.pool, refusal.needed, refusal.limit) == ("window", pages, pages - 1)
    fits = (pages - 1) * page_tokens
    for prompt, output in ((fits, 1), (fits // 2, fits - fits // 2 + 1)):
        assert small.check(prompt, output)
    if page_tokens > 1:
        assert not small.check(fits + 2, 1)


# --- Two chunks in flight, of 8,192 and 4,608 positions, and a window pool of 13,056 ---


def test_two_chunks_in_flight_do_not_stop_each_other_for_window_pages() -> None:
    case = pair(hybrid(128, 256), (400, 13_056 // 256), chunk=8192 + 4608)
    traced = Traced(case)
    fleet = traced.fleet
    for prompt in (8192, 20_480):
        fleet.submit(prompt, 4)
    fleet.settle()
    (first, *_) = traced.plans("prefill-0")
    chunks = [each for each in first.operations if isinstance(each, Chunk)]
    assert [chunk.until for chunk in chunks] == [8192, 4608]
    for prompt in (30_000, 8192, 20_480):
        fleet.submit(prompt, 4)
    fleet.settle()
    assert [record.fields["reason"] for record in traced.finished()] == ["length"] * 5


# --- 200 positions cached, and 16 more ---


@pytest.mark.parametrize("window_pages", [100, 32, 18])
def test_a_prompt_of_which_most_is_cached_takes_pages_for_its_window_and_the_rest(
    window_pages: int,
) -> None:
    """From position 73, which the query at 200 reads, to 216: 18 pages of 8."""
    case = msgspec.structs.replace(pair(hybrid(128, 8), (200, window_pages)), caches=True)
    traced = Traced(case)
    traced.fleet.run(208, 1, shared_tokens=200)
    traced.items.clear()
    answer = traced.fleet.run(216, 2, shared_tokens=200)
    assert isinstance(answer, FinishRequest) and answer.usage.cached_tokens == 200
    (first, *_) = traced.plans("prefill-0")
    starts = [each.position for each in first.operations if isinstance(each, StartRow)]
    chunks = [each.until for each in first.operations if isinstance(each, Chunk)]
    assert (starts, chunks) == ([200], [216])
    assert traced.finished()[0].fields["pages_window_peak"] == 18


def test_with_a_page_less_it_runs_too_and_in_two_chunks() -> None:
    case = msgspec.structs.replace(pair(hybrid(128, 8), (200, 17)), caches=True)
    trial = Trial(case)
    assert trial.check(208, 1, shared=200) and trial.check(216, 2, shared=200)
    assert trial.cached_tokens == 200
    trial.end()
