"""Who holds which page, and who was promised how many."""

import pytest

from tidegate.kvcache.books import Books, Holding
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    PageId,
    Pages,
    Reach,
    Tail,
    Tokens,
    Window,
)
from tidegate.kvcache.page_table import run_starts


def group(name: str, reach: Reach) -> Group:
    return Group(name, reach, Tokens(4), ())


FULL, WINDOW, TAIL = (
    group("full", All()),
    group("window", Window(Tokens(6))),
    group("tail", Tail(Tokens(4), 0)),
)


def make(*counts: int, note_freed: bool = False) -> Books:
    layout = Layout((FULL, WINDOW, TAIL)[: len(counts)], False if len(counts) > 1 else None)
    return Books(layout, counts, note_freed=note_freed)


def opened(
    books: Books, *reserve: int, keeps_windows: bool = False, start: int = 0
) -> Holding | None:
    starts = run_starts(books.layout.groups, Tokens(start), keeps_windows=keeps_windows)
    pages = [Pages(count) for count in reserve]
    holding = books.open(pages, starts, keeps_windows=keeps_windows)
    books.check()
    return holding


def must_open(
    books: Books, *reserve: int, keeps_windows: bool = False, start: int = 0
) -> Holding:
    holding = opened(books, *reserve, keeps_windows=keeps_windows, start=start)
    assert holding is not None
    return holding


def cover(
    books: Books, holding: Holding, group: int, until: int, *, surplus: bool = False
) -> tuple[PageId, ...]:
    pages = books.cover(holding, group, Tokens(until), surplus=surplus)
    books.check()
    return pages


def test_a_holding_is_opened_in_all_groups_or_in_none() -> None:
    books = make(8, 3)
    assert opened(books, 4, 4) is None
    assert books.available(0) == 8 and books.is_idle
    assert books.shortage([Pages(4), Pages(4)]) == (1, 1)
    must_open(books, 4, 3)
    assert (books.available(0), books.available(1)) == (4, 0)
    assert opened(books, 1, 1) is None
    assert books.shortage([Pages(6), Pages(1)]) == (0, 2)
    assert books.shortage([Pages(4), Pages(0)]) is None


def test_a_reserve_is_there_when_it_is_wanted() -> None:
    books = make(8)
    first, second = must_open(books, 5), must_open(books, 3)
    assert cover(books, first, 0, 100, surplus=True) == (0, 1, 2, 3, 4)
    assert cover(books, second, 0, 12) == (5, 6, 7)
    assert first.covered == 20 and second.covered == 12


def test_beyond_the_reserve_only_what_nobody_was_promised_is_taken_and_only_if_asked() -> None:
    books = make(8)
    first = must_open(books, 2)
    must_open(books, 3)
    assert len(cover(books, first, 0, 100)) == 2
    assert len(cover(books, first, 0, 100, surplus=True)) == 3
    assert books.available(0) == 0 and books.pools[0].free_count == 3
    assert opened(books, 1) is None


def test_whether_positions_can_be_covered_is_known_without_taking_a_page() -> None:
    books = make(8, 4)
    first = must_open(books, 2, 2)
    must_open(books, 3, 1)
    for until, alone, with_surplus in ((8, True, True), (12, False, True), (13, False, False)):
        found = [books.can_cover(first, Tokens(until), surplus=each) for each in (False, True)]
        assert found == [alone, with_surplus]
    assert (first.covered, books.available(1)) == (0, 1)


def test_pages_below_a_settled_position_are_free_at_once() -> None:
    books = make(8, 4)
    holding = must_open(books, 8, 3)
    cover(books, holding, 0, 12)
    cover(books, holding, 1, 12)
    books.reclaim(holding, Tokens(8))  # Query 8 reads from 3 on: page 0 is still needed.
    assert holding.tables[1].page_count == 3
    books.reclaim(holding, Tokens(9))
    books.check()
    assert holding.tables[1].ids == (1, 2) and holding.tables[0].page_count == 3
    # The reserve stands: what came back is promised to the same holding.
    assert holding.promised(1) == 1 and books.available(1) == 1


def test_surplus_that_comes_back_is_promised_to_nobody() -> None:
    books = make(8, 6)
    holding = must_open(books, 8, 2)
    cover(books, holding, 1, 24, surplus=True)
    assert books.available(1) == 0
    books.reclaim(holding, Tokens(24))  # Query 24 reads from 19 on.
    books.check()
    assert holding.tables[1].page_count == 2 and books.available(1) == 4


def test_pages_at_the_end_that_are_shed_are_free_at_once() -> None:
    books = make(5)
    holding = must_open(books, 2)
    assert cover(books, holding, 0, 16, surplus=True) == (0, 1, 2, 3)
    books.shed(holding, 0, Pages(2))
    books.check()
    assert holding.covered == 8 and books.available(0) == 3
    # Below its reserve it is promised again what it sheds.
    books.shed(holding, 0, Pages(1))
    books.check()
    assert (books.available(0), books.pools[0].free_count) == (3, 4)
    assert cover(books, holding, 0, 16) == (1,)


def test_the_next_page_to_come_back_is_told_for_all_groups_together() -> None:
    books = make(9, 9, 9)
    holding = must_open(books, 9, 9, 9)
    for group in range(3):
        cover(books, holding, group, 20)
    # A page of the window is past when query 9 reads from 4 on, and one of the tail at 4.
    assert books.next_reclaim(holding) == 4
    books.reclaim(holding, Tokens(4))
    assert books.next_reclaim(holding) == 8
    books.reclaim(holding, Tokens(8))
    assert books.next_reclaim(holding) == 9
    books.reclaim(holding, Tokens(9))
    assert books.next_reclaim(holding) == 12
    full = make(9)
    assert full.next_reclaim(must_open(full, 2)) is None


def test_window_pages_stay_until_the_hand_off_where_they_must_and_others_do_not() -> None:
    books = make(8, 8, 8)
    holding = must_open(books, 8, 8, 8, keeps_windows=True)
    for index in range(3):
        cover(books, holding, index, 20)
    books.reclaim(holding, Tokens(20))
    books.check()
    assert [table.page_count for table in holding.tables] == [5, 5, 0]
    holding.keeps_windows = False
    books.reclaim(holding, Tokens(20))
    books.check()
    assert [table.page_count for table in holding.tables] == [5, 2, 0]


def test_withdrawn_pages_are_free_when_the_worker_has_completed_the_plan() -> None:
    books = make(8)
    first, second = must_open(books, 3), must_open(books, 2)
    cover(books, first, 0, 12)
    cover(books, second, 0, 8)
    books.withdraw(first, 4)
    books.withdraw(second, 6)
    books.check()
    assert books.pools[0].draining_count == 5 and books.is_draining
    books.complete(3)
    assert books.pools[0].draining_count == 5
    books.complete(5)
    books.check()
    assert books.pools[0].draining_count == 2
    books.complete(6)
    books.check()
    assert books.pools[0].free_count == 8 and books.is_idle


def test_a_promise_that_was_not_used_is_free_at_once() -> None:
    books = make(8)
    holding = must_open(books, 8)
    cover(books, holding, 0, 8)
    books.withdraw(holding, 1)
    books.check()
    assert books.available(0) == 6
    empty = must_open(books, 6)
    books.withdraw(empty, 2)
    books.complete(1)
    assert books.is_idle and not books.is_draining


def test_a_closed_holding_keeps_its_pages_and_is_promised_no_more() -> None:
    books = make(8)
    holding = must_open(books, 5)
    cover(books, holding, 0, 8)
    books.close(holding)
    books.check()
    assert holding.promised(0) == 0 and books.available(0) == 6
    assert cover(books, holding, 0, 100) == ()


def test_a_reserve_is_only_ever_lowered() -> None:
    books = make(8)
    holding = must_open(books, 5)
    cover(books, holding, 0, 12)
    books.lower(holding, [Pages(2)])
    books.check()
    assert holding.promised(0) == 0 and books.available(0) == 5
    with pytest.raises(AssertionError, match="only ever lowered"):
        books.lower(holding, [Pages(3)])


def test_withdrawing_twice_is_a_failure() -> None:
    books = make(8)
    holding = must_open(books, 2)
    books.withdraw(holding, 1)
    with pytest.raises(KeyError):
        books.withdraw(holding, 1)


def test_freed_pages_are_noted_for_those_who_ask() -> None:
    books = make(8, 8, note_freed=True)
    holding = must_open(books, 8, 8)
    cover(books, holding, 0, 8)
    cover(books, holding, 1, 24)
    books.reclaim(holding, Tokens(24))
    assert books.take_freed() == [[], [0, 1, 2, 3]]
    assert books.take_freed() == [[], []]
    books.withdraw(holding, 1)
    assert books.take_freed() == [[], []]
    books.complete(1)
    assert books.take_freed() == [[0, 1], [4, 5]]


def test_a_holding_remembers_the_most_pages_that_it_had() -> None:
    books = make(8, 8)
    holding = must_open(books, 8, 8)
    cover(books, holding, 1, 24)
    books.reclaim(holding, Tokens(24))
    cover(books, holding, 1, 28)
    assert holding.peak == [0, 6]


def test_runs_begin_where_the_next_query_reads() -> None:
    groups = (FULL, WINDOW, TAIL)
    assert run_starts(groups, Tokens(21), keeps_windows=False) == (0, 16, 20)
    assert run_starts(groups, Tokens(21), keeps_windows=True) == (0, 0, 20)
