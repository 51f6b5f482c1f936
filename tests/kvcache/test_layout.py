"""What a layout must state, and the arithmetic of positions and pages."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.layout import (
    All,
    Group,
    Layout,
    LayoutError,
    Pages,
    Reach,
    Tail,
    TensorSpec,
    Tokens,
    Window,
    first_needed,
    first_past,
    page_count,
    span,
    token_capacity,
)

SPEC = TensorSpec("k", 0, (2, 8), "bfloat16")


def group(
    reach: Reach, name: str = "g", page_tokens: int = 16, spec: TensorSpec = SPEC
) -> Group:
    return Group(name, reach, Tokens(page_tokens), (spec,))


FULL = group(All(), "full")
WINDOW = group(Window(Tokens(8)), "window")


def test_the_flag_must_be_stated_with_window_layers() -> None:
    with pytest.raises(LayoutError, match="must state swa_only_transfer"):
        Layout((FULL, WINDOW), None).check()
    Layout((FULL, WINDOW), True).check()
    Layout((FULL, WINDOW), False).check()


@pytest.mark.parametrize("flag", [True, False])
def test_the_flag_means_nothing_without_window_layers(flag: bool) -> None:
    with pytest.raises(LayoutError, match="applies only to models with window layers"):
        Layout((FULL,), flag).check()
    Layout((FULL,), None).check()
    Layout((FULL, group(Tail(Tokens(4), 1), "tail")), None).check()


def test_an_operator_may_force_the_flag_to_false_only() -> None:
    declared, denied = Layout((FULL, WINDOW), True), Layout((FULL, WINDOW), False)
    assert declared.with_forced_flag(False) == denied
    assert declared.with_forced_flag(None) is declared
    assert declared.with_forced_flag(True) is declared
    assert denied.with_forced_flag(False) is denied
    with pytest.raises(LayoutError, match="only false can be forced"):
        denied.with_forced_flag(True)
    for forced in (True, False):
        with pytest.raises(LayoutError, match="no window layers"):
            Layout((FULL,), None).with_forced_flag(forced)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Layout((), None), "at least one group"),
        (Layout((FULL, group(All(), "full")), None), "names must differ"),
        (Layout((group(All(), ""),), None), "needs a name"),
        (Layout((Group("g", All(), Tokens(16), ()),), None), "at least one tensor"),
        (Layout((group(All(), page_tokens=0),), None), "page_tokens of group 'g'"),
        (Layout((group(All(), page_tokens=4097),), None), "must be 1 to 4096"),
        (Layout((group(Window(Tokens(0))),), True), "at least 1 token"),
        (Layout((group(Tail(Tokens(0), 0)),), None), "needs ratio >= 1"),
        (Layout((group(Tail(Tokens(4), -1)),), None), "overlap >= 0"),
        (Layout((group(All(), spec=TensorSpec("k", 0, (2,), "int3")),), None), "'int3'"),
        (Layout((group(All(), spec=TensorSpec("k", 0, (), "float32")),), None), "empty shape"),
        (Layout((group(All(), spec=TensorSpec("k", 0, (2, 0), "float32")),), None), "empty"),
        (
            Layout((group(All(), spec=TensorSpec("k", 0, (2,), "float32", 3)),), None),
            "which must divide the page of 16 tokens",
        ),
        (Layout((group(All(), spec=TensorSpec("k", 0, (2,), "float32", 0)),), None), "per 0"),
    ],
)
def test_a_layout_that_cannot_be_served_says_what_is_wrong(bad: Layout, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        bad.check()


def test_a_layout_crosses_the_wire_unchanged() -> None:
    layout = Layout((FULL, WINDOW, group(Tail(Tokens(4), 1), "tail")), True)
    packed = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(packed, type=Layout) == layout


def test_a_page_has_the_bytes_of_its_entries() -> None:
    compressed = TensorSpec("c", 1, (3,), "float32", tokens_per_entry=4)
    both = Group("full", All(), Tokens(16), (SPEC, compressed))
    assert SPEC.entry_bytes == 2 * 8 * 2
    assert both.page_bytes == 16 * 32 + 4 * 12


REACHES: st.SearchStrategy[Reach] = st.one_of(
    st.just(All()),
    st.builds(Window, st.integers(1, 40).map(Tokens)),
    st.builds(Tail, st.integers(1, 9).map(Tokens), st.integers(0, 2)),
)


@given(REACHES, st.integers(0, 200))
def test_first_needed_never_falls_and_never_passes_the_query(
    reach: Reach, position: int
) -> None:
    here, next_one = (
        first_needed(reach, Tokens(position)),
        first_needed(reach, Tokens(position + 1)),
    )
    assert 0 <= here <= next_one <= position + 1
    assert here <= position


@given(REACHES, st.integers(1, 200))
def test_the_first_query_past_a_position_is_found_by_walking(
    reach: Reach, position: int
) -> None:
    past = first_past(reach, Tokens(position))
    if isinstance(reach, All):
        assert past is None
    else:
        assert past == next(
            n for n in range(1000) if first_needed(reach, Tokens(n)) >= position
        )


@given(REACHES, st.integers(1, 5), st.integers(0, 120))
def test_bytes_that_are_kept_are_those_of_whole_entries_that_a_walk_finds(
    reach: Reach, tokens_per_entry: int, length: int
) -> None:
    spec = TensorSpec("k", 0, (2, 8), "bfloat16", tokens_per_entry)
    one = group(reach, page_tokens=4 * tokens_per_entry, spec=spec)

    def walked(length: int) -> int:
        needed = range(one.first_needed(Tokens(length)), length)
        entries = {n // tokens_per_entry for n in needed}
        sizes = [sum(n // tokens_per_entry == entry for n in needed) for entry in entries]
        return sizes.count(tokens_per_entry) * 32

    assert one.kept_bytes(Tokens(length)) == walked(length)
    if isinstance(reach, All):
        assert one.kept_bytes_max is None
    else:
        assert one.kept_bytes_max == max(walked(n) for n in range(200))


def test_what_a_query_reads_of_each_reach() -> None:
    window = Window(Tokens(128))
    assert [first_needed(window, Tokens(n)) for n in (0, 127, 128, 500)] == [0, 0, 1, 373]
    assert first_needed(All(), Tokens(500)) == 0
    # The rows of the window of 4 not yet closed, and with overlap of the one before.
    assert [first_needed(Tail(Tokens(4), 0), Tokens(n)) for n in (3, 4, 7, 8)] == [0, 4, 4, 8]
    assert [first_needed(Tail(Tokens(4), 1), Tokens(n)) for n in (3, 4, 7, 8)] == [0, 0, 0, 4]


@given(st.integers(1, 20), st.integers(0, 100), st.integers(0, 100))
def test_pages_are_counted_as_a_walk_counts_them(page: int, start: int, end: int) -> None:
    touched = {position // page for position in range(start, end)}
    assert span(Tokens(start), Tokens(end), Tokens(page)) == len(touched)
    assert page_count(Tokens(end), Tokens(page)) == len({p // page for p in range(end)})
    one = group(All(), page_tokens=page)
    assert one.start_of(one.page_of(Tokens(start))) <= start
    assert one.start_of(Pages(one.page_of(Tokens(start)) + 1)) > start


@given(st.integers(0, 50), st.integers(1, 17))
def test_pages_hold_as_many_positions_as_need_that_many_pages(count: int, page: int) -> None:
    held = token_capacity(Pages(count), Tokens(page))
    assert page_count(held, Tokens(page)) == count
    assert page_count(Tokens(held + 1), Tokens(page)) == count + 1


def test_the_bytes_of_a_position_are_rounded_up() -> None:
    # 32 bytes for each position, and 4 for each compression window of 16.
    compressed = TensorSpec("c", 0, (1,), "float32", tokens_per_entry=16)
    both = Group("g", All(), Tokens(32), (SPEC, compressed))
    assert both.entry_count(compressed) == 2
    assert both.page_bytes == 32 * 32 + 2 * 4
    assert both.bytes_per_token == 33
    assert FULL.bytes_per_token == 32


def test_only_a_window_group_has_window_tokens() -> None:
    assert WINDOW.window_tokens == 8
    assert FULL.window_tokens is None
    assert group(Tail(Tokens(4), 1)).window_tokens is None
