"""What the cache costs, in calls of functions: noise of the machine does not matter.

For each page a bounded number of calls, however long the prompt, wide the window, or large
the cache. (Sorting by age takes more with more pages, but in C, and only by the logarithm.)
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

import pytest

from fakes.cached_worker import layout_of
from tidegate.kvcache.books import Books
from tidegate.kvcache.demand import Leg, Lengths, floors
from tidegate.kvcache.layout import All, Layout, Tokens, Window
from tidegate.kvcache.page_table import run_starts

CHUNK = 64


def layout(window: int) -> Layout:
    return layout_of((All(), 1), (Window(Tokens(window)), 1))


def count_calls(work: Callable[[], object]) -> int:
    calls = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name != "<genexpr>"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def serve(books: Books, prompt: Sequence[int]) -> int:
    """A whole prompt; its positions' numbers serve as hashes. Returns the cached tokens."""
    length = Tokens(len(prompt))
    hit = books.find(prompt, length, keeps_windows=False)
    assert hit is not None
    holding = books.open(
        floors(books.layout, Leg.WHOLE, Lengths(length, Tokens(1))),
        run_starts(books.layout.groups, hit.tokens, keeps_windows=False),
        keeps_windows=False,
        hit=hit,
    )
    assert holding is not None
    settled = hit.tokens
    while settled < length:
        for group in range(2):
            books.cover(holding, group, Tokens(min(settled + CHUNK, length)), surplus=True)
        settled = min(holding.covered, length)
        books.publish(holding, settled)
        books.reclaim(holding, settled)
    books.withdraw(holding, 1)
    books.complete(1)
    return hit.tokens


def fresh(count: int, books: Books, start: int = 0) -> Callable[[], object]:
    """Serve `count` prompts of 200 tokens that share nothing."""
    return lambda: [
        serve(books, range(start + n * 1000, start + n * 1000 + 200)) for n in range(count)
    ]


def test_the_cost_of_a_page_does_not_grow_with_the_prompt() -> None:
    costs: list[float] = []
    for length in (1000, 4000):
        books = Books(layout(32), (10_000, 10_000), caches=True)
        costs.append(count_calls(partial(serve, books, range(length))) / length)
    assert costs[1] <= 1.1 * costs[0]


def test_the_cost_of_a_page_does_not_grow_with_the_window() -> None:
    """With all pages evicted in the end, in the order that takes loose ones one by one."""
    costs: list[float] = []
    for window in (8, 512):
        books = Books(layout(window), (4000, 4000), caches=True)

        def work(books: Books = books) -> None:
            serve(books, range(3000))
            books.evict_all()

        costs.append(count_calls(work))
    assert costs[1] <= 1.2 * costs[0]


def test_the_cost_of_a_prompt_does_not_grow_with_the_cache_or_with_what_is_evicted() -> None:
    """Both caches are full: each page that is taken has to be evicted."""
    costs: list[int] = []
    for pages in (1000, 16_000):
        books = Books(layout(32), (pages, pages), caches=True)
        fresh(pages // 200 + 5, books)()
        assert books.pools[0].free_count < 200
        costs.append(count_calls(fresh(20, books, 10**9)))
    assert costs[1] <= 1.2 * costs[0]


def test_the_cost_of_a_hit_does_not_grow_with_those_who_hit_the_same() -> None:
    """Many prompts part from one another at the same place."""
    books = Books(layout(32), (100_000, 100_000), caches=True)

    def fork(number: int) -> list[int]:
        return [*range(300), *range(1000 * number, 1000 * number + 64)]

    serve(books, range(300))
    costs: list[int] = []
    for first, last in ((1, 5), (6, 500)):
        for number in range(first, last):
            assert serve(books, fork(number)) >= 299
        costs.append(count_calls(partial(serve, books, fork(last))))
    assert costs[1] <= 1.1 * costs[0]


@pytest.mark.parametrize("length", [1000, 16_000])
def test_a_lookup_looks_at_few_units(length: int) -> None:
    books = Books(layout(32), (20_000, 20_000), caches=True)
    serve(books, range(length))
    chain = range(length + 500)
    calls = count_calls(lambda: books.find(chain, Tokens(length + 500), keeps_windows=False))
    assert calls < 60
