"""A page is free, owned or draining, and never two of these."""

import pytest

from tidegate.kvcache.layout import PageId, Pages
from tidegate.kvcache.pool import HoldingId, PagePool

ONE, TWO = HoldingId(1), HoldingId(2)


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.free_count, pool.owned_count, pool.draining_count


def test_a_page_goes_from_free_to_owned_to_draining_to_free() -> None:
    pool = PagePool(Pages(4))
    assert counts(pool) == (4, 0, 0)
    pages = pool.take(3, ONE)
    assert pages == (0, 1, 2) and counts(pool) == (1, 3, 0)
    assert pool.owner(pages[0]) == ONE and pool.owner(PageId(3)) is None
    pool.drain(pages[:2], ONE)
    assert counts(pool) == (1, 1, 2) and pool.owner(pages[0]) is None
    pool.end_drain(pages[:2])
    pool.give_back(pages[2:], ONE)
    assert counts(pool) == (4, 0, 0)


def test_the_lowest_pages_are_used_first_in_whatever_order_they_were_freed() -> None:
    pool = PagePool(Pages(6))
    pages = pool.take(5, ONE)
    pool.give_back([pages[4], pages[1]], ONE)
    pool.give_back([pages[2]], ONE)
    assert pool.take(2, TWO) == (1, 2)
    pool.give_back([pages[0]], ONE)
    pool.check()
    assert pool.take(3, TWO) == (0, 4, 5)
    pool.check()
    assert pool.free_count == 0 and pool.take(0, TWO) == ()


def test_nothing_is_taken_when_more_is_asked_for_than_is_free() -> None:
    pool = PagePool(Pages(2))
    with pytest.raises(AssertionError, match="3 pages asked of 2 free"):
        pool.take(3, ONE)
    assert counts(pool) == (2, 0, 0)
    assert pool.take(0, ONE) == ()


def test_freeing_what_is_not_ones_own_is_a_failure() -> None:
    pool = PagePool(Pages(2))
    (page,) = pool.take(1, ONE)
    for free in (pool.give_back, pool.drain):
        with pytest.raises(AssertionError, match="belongs to 1, not to 2"):
            free([page], TWO)
    with pytest.raises(AssertionError):
        pool.end_drain([page])


def test_freeing_twice_is_a_failure() -> None:
    pool = PagePool(Pages(2))
    pages = pool.take(2, ONE)
    pool.give_back(pages[:1], ONE)
    with pytest.raises(AssertionError):
        pool.give_back(pages[:1], ONE)
    pool.drain(pages[1:], ONE)
    with pytest.raises(AssertionError):
        pool.drain(pages[1:], ONE)
    pool.end_drain(pages[1:])
    with pytest.raises(AssertionError):
        pool.end_drain(pages[1:])
    assert counts(pool) == (2, 0, 0)
