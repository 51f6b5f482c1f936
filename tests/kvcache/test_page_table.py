"""Which page holds which position: one run, null below it and not granted above."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.layout import All, Group, PageId, Pages, Tokens
from tidegate.kvcache.page_table import PageTable


def table(start: int = 0, page_tokens: int = 4, ids: tuple[int, ...] = ()) -> PageTable:
    made = PageTable(Group("full", All(), Tokens(page_tokens), ()), Tokens(start))
    made.append(PageId(page) for page in ids)
    return made


def test_a_table_begins_with_the_page_that_holds_its_start() -> None:
    made = table(start=13, ids=(7, 5))
    assert (made.first_position, made.covered, made.page_count) == (12, 20, 2)
    assert table(start=13).covered == 12
    assert made.first_page_end == table(start=13).first_page_end == 16


def test_missing_pages_are_counted_up_to_a_position() -> None:
    made = table(start=13, ids=(7,))
    assert [made.missing(Tokens(n)) for n in (0, 12, 16, 17, 20, 21)] == [0, 0, 0, 1, 1, 2]


def test_a_page_is_dropped_when_all_its_positions_are_below() -> None:
    made = table(ids=(7, 5, 9))
    assert made.drop_below(Tokens(3)) == ()
    assert made.drop_below(Tokens(4)) == (7,)
    assert (made.first_position, made.covered, made.ids) == (4, 12, (5, 9))
    assert made.drop_below(Tokens(4)) == ()
    assert made.drop_below(Tokens(99)) == (5, 9)
    assert (made.first_position, made.covered) == (12, 12)


def test_a_run_names_the_pages_of_a_range_and_where_they_begin() -> None:
    made = table(start=13, ids=(7, 5, 9))
    assert made.run(Tokens(13), Tokens(24)) == (12, (7, 5, 9))
    assert made.run(Tokens(16), Tokens(17)) == (16, (5,))
    assert made.run(Tokens(20), Tokens(20)) == (20, ())
    assert made.run(Tokens(24), Tokens(24)) == (24, ())


@pytest.mark.parametrize(("start", "end"), [(11, 14), (13, 25)])
def test_a_run_beyond_the_table_is_a_failure(start: int, end: int) -> None:
    with pytest.raises(AssertionError, match="positions without a page"):
        table(start=13, ids=(7, 5, 9)).run(Tokens(start), Tokens(end))


def test_pages_beyond_a_position_are_those_that_hold_nothing_below_it() -> None:
    made = table(start=13, ids=(7, 5, 9))
    assert [made.beyond(Tokens(n)) for n in (0, 12, 13, 16, 17, 20, 21, 24, 25, 99)] == [
        3, 3, 2, 2, 1, 1, 0, 0, 0, 0
    ]  # fmt: skip
    assert made.last_page_start == 20
    assert made.drop_last(Pages(2)) == (5, 9)
    assert (made.ids, made.covered, made.last_page_start) == ((7,), 16, 12)
    assert made.drop_last(Pages(1)) == (7,) and made.drop_last(Pages(0)) == ()
    assert (made.covered, made.last_page_start, table(start=13).last_page_start) == (12, 12, 12)
    with pytest.raises(AssertionError, match="more pages than there are"):
        made.drop_last(Pages(1))


def test_clearing_gives_back_every_page_once() -> None:
    made = table(ids=(7, 5))
    assert made.clear() == (7, 5)
    assert made.clear() == () and made.covered == 8


@given(
    st.integers(1, 9),
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 80)), max_size=20),
)
def test_a_table_agrees_with_a_dictionary(
    page_tokens: int, start: int, steps: list[tuple[int, int]]
) -> None:
    """Each step appends some pages, then drops what lies below a position."""
    made = table(start, page_tokens)
    pages: dict[int, int] = {}  # Index → id.
    end, fresh = start // page_tokens, 0
    for count, position in steps:
        for _ in range(count):
            made.append([PageId(fresh)])
            pages[end] = fresh
            end, fresh = end + 1, fresh + 1
        dropped = [i for i in sorted(pages) if (i + 1) * page_tokens <= position]
        assert made.drop_below(Tokens(position)) == tuple(pages.pop(i) for i in dropped)
        assert made.ids == tuple(pages[i] for i in sorted(pages))
        assert made.covered == end * page_tokens
        assert made.first_position == min(pages, default=end) * page_tokens
