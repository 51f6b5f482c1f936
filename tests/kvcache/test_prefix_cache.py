"""What a prompt finds in the cache, and what is kept for it."""

import pytest

from fakes.cached_worker import CachedWorker, Prompt, layout_of
from tidegate.kvcache.layout import All, Reach, Tail, Tokens, Window

LAYOUTS: dict[str, tuple[tuple[Reach, int], ...]] = {
    "all": ((All(), 4),),
    "all and window": ((All(), 2), (Window(Tokens(5)), 2)),
    "a window that fills pages": ((All(), 1), (Window(Tokens(4)), 1)),
    "a window shorter than a unit": ((All(), 8), (Window(Tokens(3)), 2)),
    "pages of different sizes": ((All(), 4), (Window(Tokens(7)), 6)),
    "window alone": ((Window(Tokens(6)), 2),),
    "two windows": ((Window(Tokens(3)), 2), (All(), 2), (Window(Tokens(9)), 1)),
    "a query alone": ((All(), 2), (Window(Tokens(1)), 2)),
    "all, window and tail": ((All(), 4), (Window(Tokens(5)), 4), (Tail(Tokens(4), 1), 2)),
    "a tail that no boundary needs": ((All(), 8), (Tail(Tokens(4), 0), 4)),
}
ALL_LAYOUTS = pytest.mark.parametrize("name", LAYOUTS)


def worker(name: str, count: int = 200, *, whole_windows: bool = False) -> CachedWorker:
    layout = layout_of(*LAYOUTS[name], whole_windows=whole_windows)
    return CachedWorker(layout, [count] * len(layout.groups), whole_windows=whole_windows)


def prompt(length: int, kind: int = 1) -> Prompt:
    return tuple(kind + position % 3 for position in range(length))


def found(cached: CachedWorker, tokens: Prompt) -> int:
    hit = cached.find(tokens)
    assert hit is not None
    return hit.tokens


@ALL_LAYOUTS
@pytest.mark.parametrize("chunk", [3, None, 1000])
def test_every_shared_stretch_is_found_up_to_its_last_boundary(
    name: str, chunk: int | None
) -> None:
    """While pages last, whatever the length and wherever two prompts part."""
    unit = worker(name).unit
    if name == "all, window and tail":
        chunk = None  # A launch of another length does not write what each boundary needs.
    for length in range(1, 4 * unit + 2):
        cached = worker(name)
        cached.serve(prompt(length), chunk=chunk or unit)
        cached.check()
        for shared in range(length + 1):
            other = (*prompt(shared), 9, 9, 9)
            published = min(shared, length - 1)
            assert found(cached, other) == published // cached.unit * cached.unit


@ALL_LAYOUTS
def test_a_hit_leaves_at_least_one_position_to_feed(name: str) -> None:
    cached = worker(name)
    whole = 3 * cached.unit
    cached.serve(prompt(whole + 1), chunk=cached.unit)
    assert found(cached, prompt(whole + 1)) == whole
    assert found(cached, prompt(whole)) == whole - cached.unit
    assert found(cached, prompt(1)) == 0


@ALL_LAYOUTS
def test_the_same_prompt_again_and_a_longer_one_find_the_end(name: str) -> None:
    cached = worker(name)
    length = 5 * cached.unit + 1
    assert cached.serve(prompt(length), chunk=cached.unit) == 0
    for _ in range(3):
        assert cached.serve(prompt(length), chunk=cached.unit) == length - 1
        assert found(cached, prompt(length + 7)) == length - 1
        cached.check()


@ALL_LAYOUTS
def test_a_conversation_finds_its_last_turn_whole(name: str) -> None:
    cached = worker(name)
    turn = 3 * cached.unit
    for count in range(1, 6):
        hit = cached.serve(prompt(count * turn + 1), output=4, chunk=cached.unit)
        assert hit == (count - 1) * turn
        cached.check()


def test_prompts_with_other_hashes_share_nothing() -> None:
    """As those of another tenant, whose salt is another one."""
    cached = worker("all and window")
    cached.serve(prompt(21))
    assert found(cached, prompt(21)) == 20
    hashes = [number + 1_000_000 for number in cached.chain(prompt(21))]
    hit = cached.books.find(hashes, Tokens(21), keeps_windows=False)
    assert hit is not None and hit.tokens == 0


def test_a_hit_ends_where_the_chain_of_hashes_does() -> None:
    cached = worker("all")
    cached.serve(prompt(21))
    hit = cached.books.find(cached.chain(prompt(21))[:3], Tokens(21), keeps_windows=False)
    assert hit is not None and hit.tokens == 12


def test_units_are_found_while_the_row_that_wrote_them_still_runs() -> None:
    cached = worker("all and window")
    row = cached.start(prompt(30))
    assert row is not None
    for settled in (7, 14, 21):
        cached.launch(row, 7)
        assert found(cached, prompt(30)) == (settled - 7) // 2 * 2
        cached.settle(row)
        assert found(cached, prompt(30)) == settled // 2 * 2
        cached.check()


def test_of_a_tail_only_what_a_launch_has_written_is_found() -> None:
    """Launches end at 6, 12, 18 and 24, and each writes the two last groups of four rows, of
    which one may be unfinished: rows 0-5, 8-11, 12-17 and 20-23. A hit needs four rows."""
    cached = worker("all, window and tail")
    cached.serve(prompt(26), chunk=6)
    cached.check()
    ends = [found(cached, (*prompt(n), 9)) for n in (4, 8, 12, 16, 20, 24)]
    assert ends == [4, 4, 12, 16, 16, 24]


@pytest.mark.parametrize("chunk", [3, 1000])
def test_windows_that_are_all_moved_are_all_needed(chunk: int) -> None:
    cached = worker("all and window", whole_windows=True)
    cached.serve(prompt(25), chunk=chunk)
    cached.check()
    assert [found(cached, prompt(n)) for n in (3, 12, 25, 40)] == [2, 10, 24, 24]
    row = cached.start(prompt(25))
    assert row is not None and [t.page_count for t in row.holding.tables] == [12, 12]


def test_a_row_that_gives_windows_back_is_not_cached_where_all_are_moved() -> None:
    cached = worker("all and window", whole_windows=True)
    chain = cached.chain(prompt(25))
    assert cached.books.find(chain, Tokens(25), keeps_windows=False) is None
    moved = worker("all and window")
    assert moved.books.find(chain, Tokens(25), keeps_windows=True) is None


# What goes first.


def evicted(cached: CachedWorker, group: int) -> None:
    cached.cache.evict(group)
    cached.check()


def test_pages_before_the_last_window_go_first_and_the_upper_ones_before_the_lower() -> None:
    cached = worker("a window that fills pages")
    cached.serve(prompt(13))
    assert cached.books.pools[1].idle_count == 12
    for gone in range(1, 10):
        evicted(cached, 1)
        assert cached.books.pools[1].idle_count == 12 - gone
        # Boundary n needs positions n - 3 to n - 1.
        ends = [n for n in range(1, 13) if found(cached, prompt(n + 1)) == n]
        assert ends == list(range(min(gone + 3, 12), 13))
    evicted(cached, 1)  # The last window: without it nothing is of use.
    assert cached.books.pools[1].idle_count == cached.books.pools[0].idle_count == 0
    assert found(cached, prompt(13)) == 0


def test_of_full_pages_the_last_go_first_and_the_rest_is_still_found() -> None:
    cached = worker("a window that fills pages")
    cached.serve(prompt(13))
    for left in range(11, -1, -1):
        evicted(cached, 0)
        assert found(cached, prompt(13)) == left
        assert cached.books.pools[0].idle_count == cached.books.pools[1].idle_count == left


def test_where_a_prompt_ended_is_still_held_dear_when_its_last_pages_have_gone() -> None:
    cached = worker("a window that fills pages")
    cached.serve(prompt(13))
    cached.serve(prompt(13, 5))
    for _ in range(4):
        evicted(cached, 0)
    while cached.books.pools[1].idle_count > 6:
        evicted(cached, 1)
    assert [found(cached, prompt(13, kind)) for kind in (1, 5)] == [8, 12]


def test_so_it_is_where_the_windows_before_it_have_gone() -> None:
    cached = worker("a window that fills pages")
    cached.serve(prompt(13))
    while found(cached, prompt(11)) == 10:
        evicted(cached, 1)
    evicted(cached, 0)
    cached.serve(prompt(13, 5))
    while found(cached, prompt(12, 5)) == 11:
        evicted(cached, 1)
    assert [found(cached, prompt(13, kind)) for kind in (1, 5)] == [11, 12]


@pytest.mark.parametrize("reaches", [(All(), Window(Tokens(4))), (Window(Tokens(4)),)])
def test_pages_that_two_prompts_left_make_up_what_a_third_needs(
    reaches: tuple[Reach, ...],
) -> None:
    cached = CachedWorker(layout_of(*((reach, 1) for reach in reaches)), [60] * len(reaches))
    window = len(reaches) - 1
    cached.serve(prompt(16))
    while found(cached, prompt(15)):
        evicted(cached, window)
    assert found(cached, prompt(16)) == 15
    cached.serve(prompt(14))
    cached.check()
    assert cached.serve(prompt(15)) == 14
    while cached.books.pools[window].idle_count > 3:
        evicted(cached, window)
    assert found(cached, prompt(15)) == 14  # It was used last.


def test_without_the_windows_before_it_a_stretch_goes_at_once() -> None:
    cached = worker("a window that fills pages")
    cached.serve(prompt(13))
    for _ in range(9):
        evicted(cached, 1)
    evicted(cached, 0)
    assert cached.books.pools[0].idle_count == cached.books.pools[1].idle_count == 0


def test_what_a_hit_used_outlives_what_came_later() -> None:
    cached = worker("all")
    cached.serve(prompt(13, 1))
    cached.serve(prompt(13, 4))
    cached.serve(prompt(13, 1))
    for _ in range(3):
        evicted(cached, 0)
    assert found(cached, prompt(13, 1)) == 12 and found(cached, prompt(13, 4)) == 0


def test_a_hit_makes_younger_the_window_before_it_and_no_other() -> None:
    cached = worker("a window that fills pages")
    first, longer, other = prompt(9), prompt(17), prompt(9, 5)
    cached.serve(first)
    cached.serve(longer)
    cached.serve(other)
    for _ in range(3):
        assert cached.serve(longer) == 16  # It goes through boundary 8, but reads behind it.
    ends = [9, 17]
    while found(cached, first) == 8:
        evicted(cached, 1)
        assert found(cached, longer) == 16 and found(cached, other) == 8
    while found(cached, other) == 8:
        evicted(cached, 1)
        assert found(cached, longer) == 16
    assert [found(cached, prompt(n)) for n in ends] == [0, 16]


def test_a_prefix_that_two_prompts_share_outlives_their_ends() -> None:
    """Its boundary was hit, so its window is not among the first to go."""
    cached = worker("a window that fills pages", 60)
    for kind in (5, 7):
        cached.serve(prompt(20) + prompt(20, kind))
    while cached.books.pools[1].idle_count > 9:  # Three windows of three pages.
        evicted(cached, 1)
    assert found(cached, prompt(20) + prompt(9, 11)) == 20
    for kind in (5, 7):
        assert found(cached, prompt(20) + prompt(20, kind)) == 39


def test_pages_on_lease_are_not_evicted_and_what_is_below_them_is() -> None:
    cached = worker("all", 6)
    cached.serve(prompt(21))
    row = cached.start(prompt(9))
    assert row is not None and row.holding.cached_tokens == 8
    while cached.books.pools[0].idle_count:
        evicted(cached, 0)
    assert cached.books.pools[0].free_count == 4
    assert found(cached, prompt(21)) == 8
    cached.run(row)


def test_a_row_publishes_again_what_was_evicted_under_it() -> None:
    """Its window was taken from the cache in the middle of its prompt, and all with it."""
    cached = worker("pages of different sizes", 40)
    row = cached.start(prompt(37))
    assert row is not None
    cached.launch(row, 20)
    cached.settle(row)
    assert found(cached, prompt(37)) == 12
    evicted(cached, 1)
    assert found(cached, prompt(37)) == 0
    cached.run(row)
    cached.check()
    assert found(cached, prompt(37)) == 36
    cached.finish(row)
    cached.books.evict_all()
    assert cached.books.pools[0].free_count == cached.books.pools[1].free_count == 40


def test_a_row_goes_on_below_a_boundary_that_can_be_hit_no_more() -> None:
    """Others published below that boundary, so it is still there, but its window is not."""
    cached = CachedWorker(layout_of((All(), 4), (Window(Tokens(11)), 1)), [40, 60])
    row = cached.start(prompt(41))
    assert row is not None
    cached.launch(row, 15)
    cached.settle(row)
    assert cached.serve(prompt(12) + prompt(9, 5)) == 12
    while found(cached, prompt(13)) == 12:
        evicted(cached, 1)
    assert found(cached, prompt(12) + prompt(9, 5)) == 20
    cached.launch(row, 4)
    cached.settle(row)
    cached.check()
    assert found(cached, prompt(41)) == 16
    cached.run(row)
    assert found(cached, prompt(41)) == 40


def test_loose_pages_of_a_row_that_ended_earlier_go_first() -> None:
    cached = worker("a window that fills pages", 60)
    cached.serve(prompt(13, 1))
    cached.serve(prompt(13, 5))
    for _ in range(9):
        evicted(cached, 1)
    ends = [[n for n in range(1, 13) if found(cached, prompt(n + 1, k)) == n] for k in (1, 5)]
    assert ends == [[12], list(range(1, 13))]


def test_a_mark_that_is_overtaken_on_another_rows_path_becomes_loose() -> None:
    """Both run the same prompt. One has published its end when the other's mark gets there."""
    cached = worker("a window that fills pages", 60)
    slow, fast = cached.start(prompt(21)), cached.start(prompt(21))
    assert slow is not None and fast is not None
    cached.launch(slow, 8)
    cached.settle(slow)
    cached.finish(cached.run(fast))
    cached.finish(cached.run(slow))
    cached.check()
    while found(cached, prompt(9)) == 8:
        evicted(cached, 1)
    assert found(cached, prompt(21)) == 20


def test_what_others_on_lease_hang_on_goes_last() -> None:
    """The second row has its own pages for what it shares, and publishes below the first's."""
    cached = worker("all", 24)
    first, second = cached.start(prompt(13)), cached.start(prompt(12) + prompt(13, 5))
    assert first is not None and second is not None
    cached.run(first)
    cached.run(second)
    cached.finish(first)
    cached.serve(prompt(17, 7))
    for _ in range(4):
        evicted(cached, 0)
    assert found(cached, prompt(17, 7)) == 0
    assert found(cached, prompt(12) + prompt(13, 5)) == 24
    assert cached.books.pools[0].idle_count == 3
    evicted(cached, 0)  # The last of the shared units, and with it all that is below.
    assert cached.books.pools[0].idle_count == 2
    assert found(cached, prompt(12) + prompt(13, 5)) == 8
    cached.finish(second)
    assert cached.books.pools[0].free_count == 22


def test_two_rows_that_run_the_same_prompt_both_go_on_beyond_it() -> None:
    """The second finds nothing when it starts, and does not add what is there already."""
    cached = worker("all and window")
    rows = [cached.start(prompt(20) + prompt(13, kind)) for kind in (5, 7)]
    for _ in range(5):
        for row in rows:
            assert row is not None and row.hit is not None and row.hit.tokens == 0
            cached.launch(row, 7)
            cached.settle(row)
            cached.check()
    for row in rows:
        assert row is not None
        cached.finish(row)
        cached.check()
    for kind in (5, 7):
        assert found(cached, prompt(20) + prompt(13, kind)) == 32
    # Twenty tokens once, twelve twice.
    assert cached.cache.cached_tokens(0) == 20 + 12 + 12
    cached.books.evict_all()
    assert cached.books.pools[0].free_count == 200


def test_statistics_count_rows_tokens_and_evicted_pages() -> None:
    cached = worker("all")
    cached.serve(prompt(13))
    cached.serve(prompt(14))
    cached.serve(prompt(5, 7))
    stats = cached.cache.stats
    assert (stats.lookup_count, stats.hit_count) == (3, 1)
    assert (stats.prompt_tokens, stats.hit_tokens) == (32, 12)
    assert cached.cache.cached_tokens(0) == 16 and stats.evicted_pages == 0
    cached.books.evict_all()
    assert cached.cache.cached_tokens(0) == 0 and stats.evicted_pages == 4
