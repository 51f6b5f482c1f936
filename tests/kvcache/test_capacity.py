"""What pools hold, against the books of pages themselves and against numbers by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.books import Books
from tidegate.kvcache.capacity import (
    CONTEXT,
    ROWS,
    AtOnce,
    Count,
    Limit,
    Longest,
    PlannedWorker,
    Server,
    at_once,
    longest,
    refused_by,
    sides,
    window_cap,
    without_windows,
)
from tidegate.kvcache.demand import Leg, Lengths, Pace, floors
from tidegate.kvcache.layout import All, Group, Layout, Pages, Reach, Tail, TensorSpec, Tokens
from tidegate.kvcache.layout import Window as WindowReach

PACE = Pace(Tokens(512), 1, Tokens(32))
SPEC = TensorSpec("k", 0, (1,), "float32")
ROLE_LEGS = {
    "prefill": (Leg.SOURCE, Leg.WHOLE),
    "decode": (Leg.TARGET,),
    "both": (Leg.WHOLE,),
}


def group(name: str, reach: Reach, page_tokens: int) -> Group:
    return Group(name, reach, Tokens(page_tokens), (SPEC,))


def hybrid(window: int, page_tokens: int, *, flag: bool = True) -> Layout:
    return Layout(
        (
            group("full", All(), page_tokens),
            group("window", WindowReach(Tokens(window)), page_tokens),
        ),
        flag,
    )


def server(
    layout: Layout,
    *,
    context: int = 2**20,
    rows: int = 1000,
    pace: Pace = PACE,
    capped: bool = False,
    **counts: tuple[int, ...],
) -> Server:
    """`counts` are the pages of each role's worker."""
    return Server(
        layout=layout,
        workers=tuple(
            PlannedWorker(role, ROLE_LEGS[role], tuple(Pages(n) for n in pages))
            for role, pages in counts.items()
        ),
        context=Tokens(context),
        row_count=rows,
        pace=pace,
        is_capped_by_window=capped,
    )


def pair(layout: Layout, *counts: int, capped: bool = False) -> Server:
    return server(layout, prefill=counts, decode=counts, capped=capped)


def lengths(prompt: int, output: int) -> Lengths:
    return Lengths(Tokens(prompt), Tokens(output))


def found(tokens: int, worker: str, pool: str) -> Longest:
    return Longest(Tokens(tokens), Limit(worker, pool))


# --- The longest prompt: a full pool of 212,224 tokens, a window pool of 20,992 ---

KNOWN = (829, 82)  # Pages of 256.


def test_one_token_may_use_the_full_pool_to_its_last_token_whatever_the_flag() -> None:
    for flag in (True, False):
        known = pair(hybrid(128, 256, flag=flag), *KNOWN)
        assert longest(known, Tokens(1)) == found(212_224, "prefill", "full")


def test_two_tokens_leave_one_position_less_if_the_flag_is_true() -> None:
    known = pair(hybrid(128, 256), *KNOWN)
    assert longest(known, Tokens(2)) == found(212_223, "decode", "full")


def test_if_the_flag_is_false_a_prompt_that_is_handed_over_is_bounded_by_the_window_pool() -> (
    None
):
    known = pair(hybrid(128, 256, flag=False), *KNOWN)
    assert longest(known, Tokens(2)) == found(20_992, "prefill", "window")
    whole = server(hybrid(128, 256, flag=False), both=KNOWN)
    assert longest(whole, Tokens(2)) == found(212_223, "both", "full")


def test_a_cap_by_the_window_pool_bounds_every_prompt() -> None:
    capped = pair(hybrid(128, 256), *KNOWN, capped=True)
    for output in (1, 2, 1000):
        assert longest(capped, Tokens(output)) == found(20_992, "prefill", "window")
    assert refused_by(capped, lengths(20_993, 1)) == Limit("prefill", "window")
    assert refused_by(capped, lengths(20_992, 1)) is None


def test_the_smallest_window_pool_caps() -> None:
    uneven = server(hybrid(128, 256), prefill=(829, 82), decode=(829, 41), capped=True)
    assert window_cap(uneven) == (Limit("decode", "window"), 10_496)
    assert longest(uneven, Tokens(1)) == found(10_496, "decode", "window")


def test_nothing_caps_a_model_without_window_layers() -> None:
    layout = Layout((group("full", All(), 16),), None)
    assert window_cap(pair(layout, 100)) is None
    assert longest(pair(layout, 100, capped=True), Tokens(1)) == found(1600, "prefill", "full")


def test_the_models_context_is_a_limit_too() -> None:
    short = server(hybrid(128, 256), context=1000, prefill=KNOWN, decode=KNOWN)
    assert longest(short, Tokens(1)) == found(1000, "", CONTEXT)
    assert longest(short, Tokens(400)) == found(601, "", CONTEXT)
    assert longest(short, Tokens(5000)) == found(0, "", CONTEXT)


def test_the_tighter_side_of_a_pair_is_named() -> None:
    layout = hybrid(6, 4)
    assert longest(server(layout, prefill=(8, 4), decode=(6, 4)), Tokens(2)) == found(
        23, "decode", "full"
    )
    assert longest(server(layout, prefill=(6, 4), decode=(8, 4)), Tokens(2)) == found(
        24, "prefill", "full"
    )


# --- How many at once ---


def test_requests_at_once_by_hand() -> None:
    # Pages of 16, W 512: 1,000 + 200 tokens are 75 full pages in all, 63 for the prompt. The
    # window takes 33 pages at least, 35 when decode runs 32 ahead, 65 for a chunk of 512.
    known = pair(hybrid(512, 16), 1000, 400)
    assert at_once(known, lengths(1000, 200)) == (
        AtOnce("prefill", Count(12, "window"), Count(11, "window")),
        AtOnce("decode", Count(12, "window"), Count(11, "window")),
    )
    # 400 // 33 = 12; one chunk and 10 others are 63 + 10 * 33 <= 400; 400 // 35 = 11.
    # A prompt of 1,000 tokens has no more than 63 pages in a chunk's window.
    assert at_once(known, lengths(8000, 500)) == (
        AtOnce("prefill", Count(2, "full"), Count(2, "full")),
        AtOnce("decode", Count(1, "full"), Count(1, "full")),
    )


def test_a_single_token_is_counted_on_the_worker_that_runs_it_whole() -> None:
    known = pair(hybrid(512, 16), 1000, 400)
    (only,) = at_once(known, lengths(8000, 1))
    assert only == AtOnce("prefill", Count(2, "full"), Count(2, "full"))


def test_rows_are_a_limit_too() -> None:
    known = server(hybrid(512, 16), rows=3, both=(1000, 400))
    (only,) = at_once(known, lengths(10, 10))
    assert only == AtOnce("both", Count(3, ROWS), Count(3, ROWS))


def test_without_a_chunk_budget_a_prompt_fills_the_window_pool_at_full_speed() -> None:
    pace = Pace(None, 1, Tokens(32))
    known = server(hybrid(512, 16), pace=pace, both=(1000, 400))
    (only,) = at_once(known, lengths(8000, 2))
    assert only.floors == Count(1, "full")
    # 500 pages for the whole prompt in one launch; it is cut to what there is.
    assert only.targets == Count(0, "window")


def full_and(reach: Reach, page: int, other: int, flag: bool) -> Layout:
    return Layout(
        (group("full", All(), page), group("other", reach, other)),
        flag if isinstance(reach, WindowReach) else None,
    )


ROLLING: st.SearchStrategy[Reach] = st.one_of(
    st.builds(WindowReach, st.integers(1, 40).map(Tokens)),
    st.builds(Tail, st.integers(1, 9).map(Tokens), st.integers(0, 2)),
)
LAYOUTS = st.builds(
    full_and,
    ROLLING,
    st.integers(1, 17),
    st.integers(1, 17),
    st.booleans(),
)
COUNTS = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(
    layout=LAYOUTS,
    source=COUNTS,
    target=COUNTS,
    rows=st.integers(1, 9),
    prompt=st.integers(1, 120),
    output=st.integers(1, 40),
)
def test_as_many_as_the_books_hold_by_their_floors(
    layout: Layout,
    source: tuple[int, int],
    target: tuple[int, int],
    rows: int,
    prompt: int,
    output: int,
) -> None:
    planned = server(layout, rows=rows, prefill=source, decode=target)
    size = lengths(prompt, output)
    held: list[int] = []
    for worker, leg in sides(planned, output):
        books = Books(layout, worker.page_counts)
        needs, starts = floors(layout, leg, size), (Tokens(0),) * 2
        count = 0
        while count < rows and books.open(needs, starts, keeps_windows=True) is not None:
            count += 1
        held.append(count)
    if refused_by(planned, size) is not None:
        assert 0 in held
        return
    counts = at_once(planned, size)
    assert [each.floors.requests for each in counts] == held
    for each in counts:
        assert each.targets.requests <= each.floors.requests
        assert (each.floors.limit == ROWS) == (each.floors.requests == rows)


@given(
    layout=LAYOUTS,
    source=COUNTS,
    target=COUNTS,
    context=st.integers(1, 200),
    output=st.integers(1, 40),
    capped=st.booleans(),
)
def test_one_token_more_than_the_longest_prompt_is_refused_and_none_below(
    layout: Layout,
    source: tuple[int, int],
    target: tuple[int, int],
    context: int,
    output: int,
    capped: bool,
) -> None:
    planned = server(layout, context=context, prefill=source, decode=target, capped=capped)
    best = longest(planned, Tokens(output))
    assert refused_by(planned, lengths(best.tokens + 1, output)) == best.limit
    for prompt in range(1, best.tokens + 1):
        assert refused_by(planned, lengths(prompt, output)) is None


# --- A full cache for every layer ---


def test_a_cache_without_windows_keeps_every_tensor_of_every_position() -> None:
    layout = hybrid(128, 256)
    full = without_windows(layout)
    (only,) = full.groups
    assert only.reach == All() and full.swa_only_transfer is None
    assert only.bytes_per_token == sum(each.bytes_per_token for each in layout.groups)
    full.check()


def test_groups_of_unequal_pages_share_pages_that_both_divide() -> None:
    layout = Layout((group("full", All(), 4), group("window", WindowReach(Tokens(9)), 6)), True)
    assert [each.page_tokens for each in without_windows(layout).groups] == [12]


def test_tails_stay_what_they_are() -> None:
    tail = group("tail", Tail(Tokens(4), 1), 4)
    layout = Layout((*hybrid(9, 4).groups, tail), True)
    assert without_windows(layout).groups[1:] == (tail,)


@pytest.mark.parametrize("output", [1, 2])
def test_a_worker_of_role_both_runs_everything_whole(output: int) -> None:
    planned = server(hybrid(9, 4), both=(10, 10))
    assert [leg for _, leg in sides(planned, output)] == [Leg.WHOLE]
