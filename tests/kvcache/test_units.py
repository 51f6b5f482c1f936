"""Units of a prompt, and what of a group a hit at a unit's end needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.layout import All, Group, Layout, Reach, Tail, Tokens, Window
from tidegate.kvcache.units import GroupUnits, unit_tokens


def group(reach: Reach, page_tokens: int) -> Group:
    return Group("g", reach, Tokens(page_tokens), ())


def test_a_unit_ends_at_a_page_end_in_every_group() -> None:
    groups = (group(All(), 4), group(Window(Tokens(9)), 6), group(Tail(Tokens(4), 0), 1))
    assert unit_tokens(Layout(groups, True)) == 12
    assert [GroupUnits(each, Tokens(12)).page_count for each in groups] == [3, 2, 12]


@pytest.mark.parametrize(
    ("reach", "needed", "useful"),
    [
        (All(), [0, 0, 0], [0, 0, 0]),
        # Boundary 12 reads from 3 on, boundary 24 from 15 on, boundary 36 from 27 on.
        (Window(Tokens(10)), [0, 3, 6], [0, 0, 0]),
        (Window(Tokens(3)), [2, 5, 8], [2, 2, 2]),
        (Window(Tokens(1)), [3, 6, 9], [3, 3, 3]),  # A query reads only itself.
        (Window(Tokens(20)), [0, 1, 4], [0, 0, 0]),
        (Tail(Tokens(8), 0), [2, 6, 8], [2, 3, 2]),  # 24 is a multiple of 8: nothing is left.
        (Tail(Tokens(8), 1), [0, 4, 6], [0, 1, 0]),
    ],
)
def test_what_a_hit_needs_of_units_with_three_pages(
    reach: Reach, needed: list[int], useful: list[int]
) -> None:
    units = GroupUnits(group(reach, 4), Tokens(12))
    assert [units.needed_from(unit) for unit in range(3)] == needed
    assert [units.useful_from(unit) for unit in range(3)] == useful
    assert [units.end(unit) for unit in range(3)] == [12, 24, 36]
    assert [units.unit_of(page) for page in range(7)] == [0, 0, 0, 1, 1, 1, 2]


@given(
    st.one_of(
        st.builds(Window, st.integers(1, 40).map(Tokens)),
        st.builds(Tail, st.integers(1, 12).map(Tokens), st.integers(0, 2)),
    ),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_need_agrees_with_a_walk_over_positions(reach: Reach, page: int, pages: int) -> None:
    units = GroupUnits(group(reach, page), Tokens(page * pages))
    for unit in range(12):
        end = (unit + 1) * page * pages
        read = {p // page for p in range(units.group.first_needed(Tokens(end)), end)}
        assert units.needed_from(unit) == min(read, default=(unit + 1) * pages)
        later = (
            units.group.first_needed(Tokens(each * page * pages))
            for each in range(unit + 1, unit + 60)
        )
        lowest = min(later) // page - unit * pages
        assert units.useful_from(unit) == min(max(0, lowest), pages)
