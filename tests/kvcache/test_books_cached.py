"""Who is promised what when pages are shared, and what of the cache counts as available."""

import pytest

from fakes.cached_worker import CachedWorker, Prompt, Row, layout_of
from tidegate.kvcache.books import Books
from tidegate.kvcache.layout import All, Pages, Tokens, Window
from tidegate.kvcache.page_table import run_starts

ALL = layout_of((All(), 4))
HYBRID = layout_of((All(), 2), (Window(Tokens(5)), 2))


def prompt(length: int, kind: int = 1) -> Prompt:
    return tuple(kind + position % 3 for position in range(length))


def must_start(cached: CachedWorker, tokens: Prompt, output: int = 1) -> Row:
    row = cached.start(tokens, output)
    cached.check()
    assert row is not None
    return row


def available(cached: CachedWorker) -> list[int]:
    cached.books.check()
    return [cached.books.available(group) for group in range(len(cached.books.pools))]


def test_what_the_cache_has_is_as_available_as_what_is_free() -> None:
    cached = CachedWorker(HYBRID, [20, 10])
    cached.serve(prompt(31))
    assert [pool.free_count for pool in cached.books.pools] == [5, 1]
    assert available(cached) == [20, 10]
    cached.finish(cached.run(must_start(cached, prompt(40, 5))))
    assert available(cached) == [20, 10]


def test_free_pages_are_taken_before_any_is_evicted() -> None:
    cached = CachedWorker(ALL, [8])
    cached.serve(prompt(13))
    row = must_start(cached, prompt(20, 5))
    cached.launch(row, 20)
    assert row.holding.tables[0].ids == (3, 4, 5, 6, 7)
    assert cached.cache.stats.evicted_pages == 0
    cached.settle(row)
    second = must_start(cached, prompt(12, 7))
    cached.launch(second, 4)
    assert cached.cache.stats.evicted_pages == 1 and cached.cache.cached_tokens(0) == 24
    cached.settle(second)


def test_rows_that_share_a_prompt_need_its_full_pages_once() -> None:
    """Twelve pages for three rows of six pages each, of which five are shared."""
    cached = CachedWorker(ALL, [12])
    rows = [cached.run(must_start(cached, (*prompt(20), kind, kind))) for kind in (5, 6, 7)]
    assert [row.holding.cached_tokens for row in rows] == [0, 20, 20]
    assert available(cached) == [4]
    cached.finish(rows[0])
    assert available(cached) == [5]
    cached.finish(rows[1])
    cached.finish(rows[2])
    assert available(cached) == [12]


def test_a_leased_window_page_is_promised_to_one_and_its_place_to_the_others() -> None:
    cached = CachedWorker(HYBRID, [40, 9])
    cached.serve(prompt(21))
    first, second = must_start(cached, prompt(30)), must_start(cached, prompt(30, 1))
    for row in (first, second):
        assert row.holding.cached_tokens == 20 and row.holding.reserve[1] == 3
        assert row.holding.tables[1].page_count == 2
    # Of three pages the first has two and the second, which does not pay for them, none.
    assert [row.holding.promised(1) for row in (first, second)] == [1, 3]
    assert available(cached)[1] == 9 - 2 - 4
    cached.launch(first, 4, surplus=False)
    cached.settle(first)
    # It has dropped one that it paid for. Now the second pays for that, and is promised less.
    assert [row.holding.promised(1) for row in (first, second)] == [1, 2]
    cached.run(first)
    cached.run(second)
    cached.check()


def test_every_promise_can_be_kept_when_a_shared_window_moves_on() -> None:
    """No page is to spare: each row gives back, and takes, one page at a time."""
    cached = CachedWorker(HYBRID, [60, 6])
    cached.serve(prompt(21))
    rows = [must_start(cached, (*prompt(30), kind)) for kind in (5, 6)]
    assert available(cached)[1] == 0 and cached.start(prompt(30)) is None
    for _ in range(11):
        for row in rows:
            assert cached.launch(row, 1, surplus=False) > row.settled
            cached.settle(row)
            cached.check()


def test_a_page_read_for_a_row_that_has_gone_is_not_written_before_its_plan_ends() -> None:
    cached = CachedWorker(ALL, [4])
    cached.serve(prompt(9))
    row = must_start(cached, prompt(12))
    cached.launch(row, 4)
    cached.withdraw(row)
    assert available(cached) == [1] and cached.books.pools[0].draining_count == 3
    assert cached.start(prompt(8, 5)) is None
    hit = cached.find(prompt(12))
    assert hit is not None and hit.tokens == 8  # What is only read may be read by others.
    cached.complete(cached.plan)
    assert available(cached) == [4]
    cached.finish(cached.run(must_start(cached, prompt(16, 5))))


def test_nobody_pays_while_a_page_is_read_for_a_row_that_has_gone() -> None:
    cached = CachedWorker(HYBRID, [60, 9])
    cached.serve(prompt(21))
    first = must_start(cached, prompt(30))
    second = must_start(cached, prompt(30, 1))
    cached.launch(first, 4, surplus=False)
    cached.withdraw(first)
    assert second.holding.promised(1) == 3
    cached.launch(second, 4, surplus=False)
    cached.settle(second)  # It drops a page that the other launch still reads.
    cached.check()
    assert second.holding.promised(1) == 2
    cached.complete(cached.plan)
    cached.check()
    assert second.holding.promised(1) == 1


def test_a_hit_can_make_room_for_a_row_that_did_not_fit() -> None:
    cached = CachedWorker(ALL, [8])
    first = cached.run(must_start(cached, prompt(22)))
    assert cached.start(prompt(22, 5)) is None
    hit = cached.find(prompt(22))
    reserve = [Pages(6)]
    assert cached.books.shortage(reserve) == (0, 4)
    assert cached.books.shortage(reserve, hit) is None
    cached.run(must_start(cached, prompt(22)))
    cached.finish(first)


def test_a_hit_that_is_out_of_date_is_refused() -> None:
    cached = CachedWorker(ALL, [8])
    cached.serve(prompt(13))
    hit = cached.find(prompt(13))
    assert hit is not None and cached.books.is_valid(hit)
    cached.cache.evict(0)
    assert not cached.books.is_valid(hit)
    starts = run_starts(ALL.groups, hit.tokens, keeps_windows=False)
    with pytest.raises(AssertionError, match="out of date"):
        cached.books.open([Pages(4)], starts, keeps_windows=False, hit=hit)


def test_a_hit_is_good_while_others_publish() -> None:
    cached = CachedWorker(ALL, [20])
    cached.serve(prompt(13))
    hit = cached.find(prompt(40))
    cached.serve(prompt(21))
    assert hit is not None and cached.books.is_valid(hit) and hit.tokens == 12
    starts = run_starts(ALL.groups, hit.tokens, keeps_windows=False)
    holding = cached.books.open([Pages(10)], starts, keeps_windows=False, hit=hit)
    assert holding is not None and holding.cached_tokens == 12


def test_evicted_pages_are_among_those_freed() -> None:
    books = Books(ALL, [4], note_freed=True, caches=True)
    for kind in (0, 10):
        hit = books.find([kind, kind + 1, kind + 2], Tokens(13), keeps_windows=False)
        holding = books.open([Pages(4)], [Tokens(0)], keeps_windows=False, hit=hit)
        assert holding is not None
        books.cover(holding, 0, Tokens(13), surplus=False)
        books.publish(holding, Tokens(13))
        books.withdraw(holding, 1)
        books.complete(1)
        # The page that was not full is freed, and the second row takes what the cache has.
        assert books.take_freed() == ([[3]] if kind == 0 else [[2, 1, 0, 3]])


def test_without_a_cache_nothing_is_found_or_published() -> None:
    books = Books(ALL, [4])
    assert books.find([1, 2, 3], Tokens(13), keeps_windows=False) is None
    holding = books.open([Pages(4)], [Tokens(0)], keeps_windows=False)
    assert holding is not None
    books.cover(holding, 0, Tokens(13), surplus=False)
    books.publish(holding, Tokens(13))
    books.check()
    books.withdraw(holding, 1)
    books.complete(1)
    books.evict_all()
    assert books.pools[0].free_count == 4


def test_a_row_opened_without_a_hit_publishes_nothing() -> None:
    books = Books(ALL, [4], caches=True)
    holding = books.open([Pages(4)], [Tokens(0)], keeps_windows=False)
    assert holding is not None and books.cache is not None
    books.cover(holding, 0, Tokens(13), surplus=False)
    books.publish(holding, Tokens(13))
    assert books.cache.cached_tokens(0) == 0 and books.cache.stats.lookup_count == 0
