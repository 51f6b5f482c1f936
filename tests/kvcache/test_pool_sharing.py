"""Pages of the cache: on lease, idle, still read by a row that has gone, or free."""

import pytest

from tidegate.kvcache.layout import PageId, Pages
from tidegate.kvcache.pool import HoldingId, PagePool

ONE, TWO, THREE = HoldingId(1), HoldingId(2), HoldingId(3)
PAGE = PageId(0)


def shared(*lessees: HoldingId) -> PagePool:
    """A pool of two pages, of which one is in the cache and on lease."""
    pool = PagePool(Pages(2), note_freed=True)
    assert pool.take(1, ONE) == (PAGE,)
    pool.attach(PAGE, ONE)
    for holding in lessees:
        pool.lease(PAGE, holding)
    return pool


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    pool.check()
    return pool.free_count, pool.owned_count, pool.draining_count, pool.idle_count


def test_an_attached_page_stays_with_its_holding_and_is_idle_after_it() -> None:
    pool = shared()
    assert counts(pool) == (1, 1, 0, 0)
    assert pool.owner(PAGE) is None and pool.payer(PAGE) == ONE and pool.is_shared(PAGE)
    pool.end_lease(PAGE, ONE)
    assert counts(pool) == (1, 0, 0, 1) and pool.is_idle(PAGE)
    pool.detach(PAGE)
    assert counts(pool) == (2, 0, 0, 0) and pool.take_freed() == [PAGE]


def test_the_next_lessee_pays_when_the_payer_goes() -> None:
    pool = shared(TWO, THREE)
    assert pool.lessees(PAGE) == (ONE, TWO, THREE) and counts(pool) == (1, 1, 0, 0)
    pool.end_lease(PAGE, ONE)
    assert pool.payer(PAGE) == TWO
    pool.end_lease(PAGE, THREE)
    assert pool.payer(PAGE) == TWO and not pool.is_idle(PAGE)


def test_a_page_is_draining_while_it_is_read_for_a_lessee_that_has_gone() -> None:
    pool = shared()
    pool.begin_read([PAGE], ONE)
    assert counts(pool) == (1, 0, 1, 0) and not pool.is_idle(PAGE)
    pool.end_read([PAGE])
    assert counts(pool) == (1, 0, 0, 1)


def test_nobody_pays_for_a_page_that_is_still_read_for_another() -> None:
    pool = shared(TWO)
    pool.begin_read([PAGE], ONE)
    assert pool.payer(PAGE) is None and counts(pool) == (1, 1, 0, 0)
    pool.lease(PAGE, THREE)
    pool.begin_read([PAGE], TWO)
    pool.end_read([PAGE])
    assert pool.payer(PAGE) is None
    pool.end_read([PAGE])
    assert pool.payer(PAGE) == THREE and counts(pool) == (1, 1, 0, 0)


def test_a_page_that_leaves_the_cache_is_free_when_nobody_uses_it() -> None:
    pool = shared(TWO)
    pool.detach(PAGE)
    assert counts(pool) == (1, 1, 0, 0)
    pool.end_lease(PAGE, ONE)
    pool.begin_read([PAGE], TWO)
    assert counts(pool) == (1, 0, 1, 0) and pool.take_freed() == []
    pool.end_read([PAGE])
    assert counts(pool) == (2, 0, 0, 0) and pool.take_freed() == [PAGE]


def test_a_page_that_left_the_cache_can_come_back_from_a_lessee() -> None:
    pool = shared(TWO)
    pool.detach(PAGE)
    pool.attach(PAGE, TWO)
    pool.end_lease(PAGE, TWO)
    pool.end_lease(PAGE, ONE)
    assert pool.is_idle(PAGE)


def test_an_idle_page_is_leased_anew() -> None:
    pool = shared()
    pool.end_lease(PAGE, ONE)
    pool.lease(PAGE, TWO)
    assert counts(pool) == (1, 1, 0, 0) and pool.payer(PAGE) == TWO


def test_a_page_that_is_only_read_is_leased_anew() -> None:
    pool = shared()
    pool.begin_read([PAGE], ONE)
    pool.lease(PAGE, TWO)
    assert counts(pool) == (1, 1, 0, 0)
    pool.end_lease(PAGE, TWO)
    assert counts(pool) == (1, 0, 1, 0)


def test_a_shared_page_is_nobodys_to_free() -> None:
    pool = shared(TWO)
    for free in (pool.give_back, pool.drain):
        with pytest.raises(AssertionError, match="belongs to"):
            free([PAGE], ONE)
    with pytest.raises(AssertionError, match="not on lease to 3"):
        pool.end_lease(PAGE, THREE)
    with pytest.raises(AssertionError, match="in the cache already"):
        pool.attach(PAGE, ONE)
    with pytest.raises(AssertionError, match="on lease to 2 already"):
        pool.lease(PAGE, TWO)


def test_only_pages_of_the_cache_are_leased_or_leave_it() -> None:
    pool = shared()
    (other,) = pool.take(1, TWO)
    with pytest.raises(AssertionError, match="not in the cache"):
        pool.lease(other, ONE)
    with pytest.raises(AssertionError, match="not in the cache"):
        pool.detach(other)
    with pytest.raises(AssertionError, match="not of 1"):
        pool.attach(other, ONE)
