"""What the sizer gives fits the memory, holds a request, and agrees with `demand`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.demand import Leg, Lengths, Pace, floors
from tidegate.kvcache.geometry import geometry
from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    Pages,
    Reach,
    Tail,
    TensorSpec,
    Tokens,
    Window,
)
from tidegate.kvcache.sizer import (
    ROLLING_SHARE_MAX,
    PoolSettings,
    PoolSize,
    SizedPools,
    SizeError,
    longest_prompt,
    size_pools,
)

SOURCE = (Leg.SOURCE, Leg.WHOLE)
TARGET = (Leg.TARGET,)
WHOLE = (Leg.WHOLE,)


def group(name: str, reach: Reach, page_tokens: int = 16, values: int = 256) -> Group:
    spec = TensorSpec("k", 0, (values,), "float32")
    return Group(name, reach, Tokens(page_tokens), (spec,))


def hybrid(window: int = 512, page_tokens: int = 16, flag: bool = True) -> Layout:
    """A page has 16 KiB in the full pool and 80 KiB in the window pool."""
    return Layout(
        (
            group("full", All(), page_tokens),
            group("window", Window(Tokens(window)), page_tokens, values=5 * 256),
        ),
        swa_only_transfer=flag,
    )


def settings(
    kv_memory: int | None,
    *,
    full: int | None = None,
    window: int | None = None,
    max_running: int = 32,
    chunk: int | None = 512,
    context: int = 32_768,
    legs: tuple[Leg, ...] = SOURCE,
) -> PoolSettings:
    return PoolSettings(
        kv_memory=kv_memory,
        full_pool_tokens=None if full is None else Tokens(full),
        window_pool_tokens=None if window is None else Tokens(window),
        max_running=max_running,
        pace=Pace(None if chunk is None else Tokens(chunk), 1, Tokens(32)),
        context=Tokens(context),
        legs=legs,
    )


def test_the_window_pool_gets_its_targets_and_the_full_pool_every_other_byte() -> None:
    layout = hybrid()
    sized = size_pools(layout, settings(2**30))
    # 32 rows of 35 pages and one chunk of 65, and a quarter on top.
    assert sized.page_counts[1] == (32 * 35 + 65) * 5 // 4
    left = 2**30 - geometry(layout, sized.page_counts).byte_count
    assert 0 <= left < layout.groups[0].page_bytes
    assert sized.warnings == ()
    assert "full" in sized.table() and "1,481 pages" in sized.table()


def test_a_window_pool_that_would_take_too_much_is_cut_and_that_is_told() -> None:
    layout = hybrid()
    memory = 64 * 2**20
    sized = size_pools(layout, settings(memory))
    window_bytes = sized.page_counts[1] * layout.groups[1].page_bytes
    assert 0.99 * ROLLING_SHARE_MAX * memory < window_bytes <= ROLLING_SHARE_MAX * memory
    assert "the window pool has" in sized.warnings[0]
    assert "32 running requests at full speed use 1481" in sized.warnings[0]


def test_a_window_pool_never_gets_less_than_one_request_needs() -> None:
    layout = hybrid()
    floor_bytes = 33 * layout.groups[1].page_bytes + layout.groups[0].page_bytes
    sized = size_pools(layout, settings(floor_bytes))
    assert sized.page_counts == (1, 33)
    with pytest.raises(SizeError, match=rf"--kv-memory: .* give at least {floor_bytes}"):
        size_pools(layout, settings(floor_bytes - 1))


def test_prompts_that_the_pools_cannot_hold_are_warned_about() -> None:
    sized = size_pools(hybrid(), settings(None, full=1000, max_running=1))
    assert sized.page_counts[0] == 63
    assert sized.warnings == (
        "prompts of up to 1008 tokens fit the pools, and the model's context is 32768: "
        "raise --full-pool-tokens for longer ones",
    )


def test_pool_sizes_that_are_given_are_kept() -> None:
    sized = size_pools(hybrid(), settings(2**30, full=4096, window=1024))
    assert sized.page_counts == (256, 64)
    with pytest.raises(SizeError, match=r"--kv-memory: .* these pool sizes"):
        size_pools(hybrid(), settings(2**20, full=4096, window=1024))


def test_a_full_pool_that_is_given_leaves_the_rest_to_the_window_pool() -> None:
    sized = size_pools(hybrid(), settings(200 * 2**20, full=4096))
    assert sized.page_counts == (256, 1481)


def test_a_window_pool_below_one_window_is_refused_with_the_size_that_would_do() -> None:
    with pytest.raises(
        SizeError, match=r"--window-pool-tokens: .* needs 33: give at least 528"
    ):
        size_pools(hybrid(), settings(2**30, window=256))
    # A model whose whole context is shorter than the window needs no more than that.
    size_pools(hybrid(), settings(2**30, window=256, context=256))


def test_without_any_size_the_settings_are_named() -> None:
    with pytest.raises(SizeError, match="--kv-memory or --full-pool-tokens"):
        size_pools(hybrid(), settings(None, window=1024))


@pytest.mark.parametrize("legs", [SOURCE, TARGET])
def test_with_the_flag_false_both_pools_cover_the_same_tokens(legs: tuple[Leg, ...]) -> None:
    layout = hybrid(flag=False)
    for sized in (
        size_pools(layout, settings(2**27, legs=legs)),
        size_pools(layout, settings(None, full=9000, legs=legs)),
        size_pools(layout, settings(2**28, full=900, legs=legs)),
    ):
        full, window = sized.page_counts
        assert full == window
        assert longest_prompt(layout, sized.page_counts, legs[0], context=Tokens(32_768)) == (
            16 * full
        )


def test_with_the_flag_false_a_given_window_pool_bounds_the_prompt() -> None:
    layout = hybrid(flag=False)
    sized = size_pools(layout, settings(2**28, window=160))
    assert sized.page_counts[1] == 10
    longest = longest_prompt(layout, sized.page_counts, Leg.SOURCE, context=Tokens(32_768))
    assert longest == 160


def test_a_worker_without_hand_off_is_sized_as_if_the_flag_were_true() -> None:
    with_flag = size_pools(hybrid(flag=True), settings(2**30, legs=WHOLE))
    without = size_pools(hybrid(flag=False), settings(2**30, legs=WHOLE))
    assert with_flag.page_counts == without.page_counts


def test_a_model_without_window_layers_gets_one_pool() -> None:
    layout = Layout((group("full", All()),), swa_only_transfer=None)
    sized = size_pools(layout, settings(2**24))
    assert sized.page_counts == (1024,)


def test_a_model_with_window_layers_only_gets_one_pool() -> None:
    layout = Layout((group("window", Window(Tokens(512))),), swa_only_transfer=True)
    sized = size_pools(layout, settings(2**30))
    assert sized.page_counts == (1481,)
    assert longest_prompt(layout, sized.page_counts, Leg.SOURCE, context=Tokens(5000)) == 5000


def test_without_a_full_pool_the_window_pool_alone_needs_a_size() -> None:
    groups = (group("window", Window(Tokens(512))),)
    rolling, kept = (Layout(groups, swa_only_transfer=flag) for flag in (True, False))
    with pytest.raises(SizeError, match="give --kv-memory or --window-pool-tokens"):
        size_pools(rolling, settings(None, full=1024))
    assert size_pools(rolling, settings(None, window=1024)) == SizedPools(
        (Pages(64),), (), (PoolSize("window", Tokens(16), Pages(64), Tokens(1024), 2**20),)
    )
    for sized, option in (
        (size_pools(kept, settings(None, window=1024)), "--window-pool-tokens"),
        (size_pools(kept, settings(2**20)), "--kv-memory"),
    ):
        assert sized.page_counts == (64,)
        assert sized.warnings == (
            "prompts of up to 1024 tokens fit the pools, and the model's context is 32768: "
            f"raise {option} for longer ones",
        )


def test_no_chunk_budget_asks_for_the_whole_context_in_the_window_pool() -> None:
    sized = size_pools(hybrid(), settings(2**31, chunk=None, context=8192))
    assert sized.page_counts[1] == (32 * 35 + 512) * 5 // 4


REACHES: list[Reach] = [
    All(),
    Window(Tokens(1)),
    Window(Tokens(17)),
    Window(Tokens(128)),
    Tail(Tokens(4), 1),
]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    groups = tuple(
        group(
            f"group{index}",
            draw(st.sampled_from(REACHES)),
            draw(st.sampled_from([1, 4, 16, 64])),
            draw(st.integers(1, 64)),
        )
        for index in range(draw(st.integers(1, 3)))
    )
    has_window = any(g.is_window for g in groups)
    return Layout(groups, draw(st.booleans()) if has_window else None)


@given(
    layout=layouts(),
    kv_memory=st.integers(1, 2**22),
    max_running=st.integers(1, 16),
    chunk=st.sampled_from([None, 1, 64, 512]),
    context=st.integers(2, 2000),
    legs=st.sampled_from([SOURCE, TARGET, WHOLE]),
    full=st.none() | st.integers(1, 3000),
    window=st.none() | st.integers(1, 3000),
)
def test_pools_fit_the_memory_and_hold_a_request_or_a_setting_is_named(
    layout: Layout,
    kv_memory: int,
    max_running: int,
    chunk: int | None,
    context: int,
    legs: tuple[Leg, ...],
    full: int | None,
    window: int | None,
) -> None:
    chosen = settings(
        kv_memory,
        full=full,
        window=window,
        max_running=max_running,
        chunk=chunk,
        context=context,
        legs=legs,
    )
    try:
        sized = size_pools(layout, chosen)
    except SizeError:
        with pytest.raises(SizeError, match=r"--[a-z-]+: .* give at least \d+"):
            size_pools(layout, chosen)
        return
    assert geometry(layout, sized.page_counts).byte_count <= kv_memory
    for leg in legs:
        longest = longest_prompt(layout, sized.page_counts, leg, context=Tokens(context))
        assert longest >= 1
        needs = floors(layout, leg, Lengths(longest, Tokens(1)))
        assert all(n <= count for n, count in zip(needs, sized.page_counts, strict=True))
        if longest < context:
            over = floors(layout, leg, Lengths(Tokens(longest + 1), Tokens(1)))
            # Unless the flag is false, only pools that keep everything bound a prompt.
            for g, need, count in zip(layout.groups, over, sized.page_counts, strict=True):
                is_kept = isinstance(g.reach, All) or (
                    layout.swa_only_transfer is False and g.is_window and legs != WHOLE
                )
                assert need <= count or is_kept


@given(
    layout=layouts(),
    counts=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    leg=st.sampled_from(list(Leg)),
    context=st.integers(1, 300),
    output=st.integers(1, 40),
)
def test_the_longest_prompt_is_that_of_a_walk_over_all_lengths(
    layout: Layout, counts: list[int], leg: Leg, context: int, output: int
) -> None:
    page_counts = counts[: len(layout.groups)]
    fitting = [
        prompt
        for prompt in range(1, context + 2 - output)
        if all(
            need <= count
            for need, count in zip(
                floors(layout, leg, Lengths(Tokens(prompt), Tokens(output))),
                page_counts,
                strict=True,
            )
        )
    ]
    found = longest_prompt(layout, page_counts, leg, context=Tokens(context), output=output)
    assert found == max(fitting, default=0)
    assert fitting == list(range(1, found + 1))
