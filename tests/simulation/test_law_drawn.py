"""The law on drawn layouts: windows of 1 to 4096, pages of 1 to 256, tails, any pools."""

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.known_layouts import layout_of, tail, window
from simulation.law import Case, Door, Trial, edges, ever_needed, longest, near
from tidegate.ipc.protocol import Role
from tidegate.kvcache.layout import All, Layout, Reach

# What moves page by page takes a launch for each page, which reads all pages of a window.
WINDOW_PAGES_MAX = 128
PROMPT_PAGES_MAX = 400
CHUNK_COUNT_MAX = 64
ROLES = st.sampled_from(
    (
        (Role.PREFILL, Role.DECODE),
        (Role.BOTH,),
        (Role.PREFILL, Role.DECODE, Role.BOTH),
        (Role.PREFILL, Role.PREFILL, Role.DECODE),
    )
)
WINDOWS = st.one_of(
    st.integers(1, 40), st.integers(1, 4096), st.sampled_from((127, 128, 129, 512, 1024, 4096))
)
PAGES = st.one_of(st.integers(1, 256), st.sampled_from((1, 16, 64, 128, 256)))


@dataclass(frozen=True)
class Drawn:
    """A case, and requests near its edges."""

    case: Case
    requests: list[tuple[int, int | None, int]]  # Prompt, output, and how much is shared.


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    windows = [window(tokens) for tokens in draw(st.lists(WINDOWS, max_size=2))]
    ratios = st.tuples(st.integers(1, 128), st.integers(0, 2))
    tails = [tail(*each) for each in draw(st.lists(ratios, max_size=2))]
    reaches: list[Reach] = [*windows, *tails]
    if draw(st.booleans()) or not reaches:
        reaches.insert(0, All())
    widest = max(
        [1, *(reach.tokens for reach in windows)]
        + [reach.ratio * (reach.overlap + 1) for reach in tails]
    )
    size_min = -(-widest // WINDOW_PAGES_MAX)
    sizes = [max(size_min, draw(PAGES)) for _ in reaches]
    if draw(st.booleans()):
        sizes = [sizes[0]] * len(sizes)
    groups = [(f"{type(reach).__name__}-{i}", reach) for i, reach in enumerate(reaches)]
    return layout_of(groups, sizes, draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts())
    widest = max((group.window_tokens or 0 for group in layout.groups), default=0)
    size_max = min(
        3 * widest + 64, PROMPT_PAGES_MAX * min(group.page_tokens for group in layout.groups)
    )
    positions = draw(st.integers(1, size_max))

    def counts() -> tuple[int, ...]:
        pages: list[int] = []
        for group in layout.groups:
            ever, whole = ever_needed(group), -(-positions // group.page_tokens)
            few = draw(st.integers(1, whole))
            edge = few if ever == inf else draw(st.integers(-1, 2)) + int(ever)
            pages.append(max(1, draw(st.sampled_from((few, edge, edge, whole)))))
        return tuple(pages)

    return Case(
        layout=layout,
        pools=tuple((role, counts()) for role in draw(ROLES)),
        chunk=draw(st.none() | st.integers(-(-size_max // CHUNK_COUNT_MAX), size_max)),
        ahead=draw(st.integers(1, 64)),
        default_max_tokens=draw(st.integers(1, 12)),
        caches=draw(st.booleans()),
    )


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    case = draw(cases())
    lengths = st.sampled_from(near(edges(case), longest(case)))
    requests: list[tuple[int, int | None, int]] = []
    for _ in range(draw(st.integers(1, 5))):
        prompt, end = draw(lengths), draw(lengths)
        to_end = max(1, end - prompt + 1)
        output = draw(st.sampled_from((1, 2, None, to_end, to_end)))
        shared = draw(st.just(prompt) | lengths)
        requests.append((prompt, output, min(prompt, shared)))
    return Drawn(case, requests)


def obey(each: Drawn) -> None:
    trial = Trial(each.case)
    for request in each.requests:
        trial.check(*request)
    trial.end()


@given(drawn())
def test_what_is_accepted_runs_to_its_end_and_nothing_else_is_refused(each: Drawn) -> None:
    obey(each)


@pytest.mark.slow
@settings(max_examples=5_000)
@given(drawn())
def test_so_it_is_in_five_thousand_cases(each: Drawn) -> None:
    obey(each)


@given(layouts().filter(lambda layout: layout.swa_only_transfer is not False), st.data())
def test_where_windows_need_not_stay_no_length_is_refused_for_one(
    layout: Layout, data: st.DataObject
) -> None:
    """As long as each pool holds what a query ever reads: then the full pool alone refuses."""
    prompt = data.draw(st.integers(1, 100_000), label="prompt")
    output = data.draw(st.integers(1, 100_000), label="output")
    full = data.draw(st.integers(1, 2_000), label="pages of full groups")
    ever = [ever_needed(group) for group in layout.groups]
    counts = tuple(full if pages == inf else int(pages) for pages in ever)
    pools = ((Role.PREFILL, counts), (Role.DECODE, counts), (Role.BOTH, counts))
    case = Case(layout=layout, pools=data.draw(st.sampled_from((pools[:2], pools[2:], pools))))
    refusal = Door(case).refusal(prompt, output)
    holds = [
        group.page_tokens * full
        for group, pages in zip(layout.groups, ever, strict=True)
        if pages == inf
    ]
    assert (refusal is None) == all(prompt + output - 1 <= tokens for tokens in holds)
    assert refusal is None or refusal.pool.startswith("All")
