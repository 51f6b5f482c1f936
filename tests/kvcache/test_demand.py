"""`demand` against a walk over positions: some query reaches the floor, and none passes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.reference import (
    first_read,
    pages_between,
    pages_to_reach,
    source_needs,
    target_needs,
    whole_needs,
)
from tidegate.kvcache.demand import (
    Demand,
    Leg,
    Lengths,
    Pace,
    Phase,
    demand,
    floor_of,
    floors,
    keeps_windows,
    longest_residency,
    targets,
)
from tidegate.kvcache.layout import All, Group, Layout, Pages, Reach, Tail, Tokens, Window

NO_PACE = Pace(None, 1, Tokens(1))


def window(tokens: int, page_tokens: int) -> Group:
    return Group("window", Window(Tokens(tokens)), Tokens(page_tokens), ())


def full(page_tokens: int) -> Group:
    return Group("full", All(), Tokens(page_tokens), ())


def lengths(prompt: int, output: int = 1) -> Lengths:
    return Lengths(Tokens(prompt), Tokens(output))


ROLLING: st.SearchStrategy[Reach] = st.one_of(
    st.builds(Window, st.integers(1, 40).map(Tokens)),
    st.builds(Tail, st.integers(1, 9).map(Tokens), st.integers(0, 2)),
)
REACHES = st.one_of(st.just(All()), ROLLING)
PAGES = st.integers(1, 17).map(Tokens)
LENGTHS = st.builds(
    Lengths,
    st.integers(1, 80).map(Tokens),
    st.one_of(st.just(1), st.integers(1, 30)).map(Tokens),
)
GROUPS = st.builds(Group, st.just("g"), REACHES, PAGES, st.just(()))
ROLLING_GROUPS = st.builds(Group, st.just("g"), ROLLING, PAGES, st.just(()))


def floor(group: Group, phase: Phase, size: Lengths) -> int:
    return demand(group, phase, size, NO_PACE, whole_prompt=False).floor


# --- Floors ---


@given(GROUPS, LENGTHS)
def test_the_prefill_floor_is_what_some_query_of_the_prompt_needs(
    group: Group, size: Lengths
) -> None:
    assert floor(group, Phase.PREFILL, size) == pages_to_reach(group, size.prompt)


@given(GROUPS, LENGTHS)
def test_the_decode_floor_is_what_some_query_up_to_the_end_needs(
    group: Group, size: Lengths
) -> None:
    assert floor(group, Phase.DECODE, size) == pages_to_reach(group, size.end)


@given(GROUPS, LENGTHS)
def test_a_hand_off_moves_what_the_next_query_reads(group: Group, size: Lengths) -> None:
    start = first_read(group, size.prompt)
    moved = pages_between(group, start, size.prompt)
    assert demand(group, Phase.HANDOFF, size, NO_PACE, whole_prompt=False) == Demand(
        Pages(moved), Pages(moved)
    )


@given(GROUPS, LENGTHS, st.sampled_from([Phase.PREFILL, Phase.HANDOFF]))
def test_window_pages_of_the_whole_prompt_stay_without_the_flag_and_no_others(
    group: Group, size: Lengths, phase: Phase
) -> None:
    kept = demand(group, phase, size, NO_PACE, whole_prompt=True)
    if group.is_window:
        pages = Pages(pages_between(group, 0, size.prompt))
        assert kept == Demand(pages, pages)
    else:
        assert kept == demand(group, phase, size, NO_PACE, whole_prompt=False)


@given(st.lists(GROUPS, min_size=1, max_size=3), LENGTHS, st.sampled_from([True, False]))
def test_the_floors_of_each_leg_are_those_of_a_walk(
    groups: list[Group], size: Lengths, flag: bool
) -> None:
    has_window = any(group.is_window for group in groups)
    layout = Layout(tuple(groups), flag if has_window else None)
    assert list(floors(layout, Leg.SOURCE, size)) == source_needs(layout, size.prompt)
    assert list(floors(layout, Leg.WHOLE, size)) == whole_needs(layout, size.end)
    assert list(floors(layout, Leg.TARGET, size)) == target_needs(layout, size.prompt, size.end)
    for index, group in enumerate(groups):
        flagged = layout.swa_only_transfer
        assert (
            floor_of(group, Leg.SOURCE, size, flagged)
            == floors(layout, Leg.SOURCE, size)[index]
        )


@given(GROUPS, LENGTHS, st.sampled_from(list(Leg)), st.sampled_from([True, False]))
def test_a_longer_request_never_needs_less(
    group: Group, size: Lengths, leg: Leg, flag: bool
) -> None:
    here = floor_of(group, leg, size, flag)
    longer_prompt = Lengths(Tokens(size.prompt + 1), size.output)
    longer_output = Lengths(size.prompt, Tokens(size.output + 1))
    assert floor_of(group, leg, longer_prompt, flag) >= here
    assert floor_of(group, leg, longer_output, flag) >= here


def test_pages_stay_for_the_hand_off_only_without_the_flag_and_where_there_is_one() -> None:
    assert keeps_windows(Leg.SOURCE, False) and keeps_windows(Leg.TARGET, False)
    assert not keeps_windows(Leg.WHOLE, False)
    for leg in Leg:
        assert not keeps_windows(leg, True) and not keeps_windows(leg, None)


# --- Targets ---


def most(group: Group, end: int, ahead: int) -> int:
    """The most pages for what a query reads and the positions up to `ahead` from it on."""
    return max(
        pages_between(group, first_read(group, n), min(end, n + ahead)) for n in range(end)
    )


@given(ROLLING_GROUPS, LENGTHS, st.integers(1, 40))
def test_the_decode_target_holds_all_that_a_row_may_run_ahead(
    group: Group, size: Lengths, ahead: int
) -> None:
    pace = Pace(None, 1, Tokens(ahead))
    target = demand(group, Phase.DECODE, size, pace, whole_prompt=False).target
    assert target >= most(group, size.end, ahead)


@given(ROLLING_GROUPS, LENGTHS, st.integers(1, 30), st.integers(1, 3))
def test_the_prefill_target_holds_the_chunks_in_flight(
    group: Group, size: Lengths, chunk: int, in_flight: int
) -> None:
    pace = Pace(Tokens(chunk), in_flight, Tokens(1))
    target = demand(group, Phase.PREFILL, size, pace, whole_prompt=False).target
    assert target >= most(group, size.prompt, chunk * in_flight)


@given(ROLLING_GROUPS, st.integers(1, 40))
def test_a_long_request_reaches_its_target_and_no_more(group: Group, ahead: int) -> None:
    pace = Pace(None, 1, Tokens(ahead))
    long = lengths(400)
    assert demand(group, Phase.DECODE, long, pace, whole_prompt=False).target == most(
        group, 400, ahead
    )


@given(GROUPS, LENGTHS, st.sampled_from(list(Phase)), st.sampled_from([True, False]))
def test_a_target_is_never_below_its_floor(
    group: Group, size: Lengths, phase: Phase, whole_prompt: bool
) -> None:
    for pace in (Pace(None, 1, Tokens(32)), Pace(Tokens(1), 1, Tokens(1)), NO_PACE):
        found = demand(group, phase, size, pace, whole_prompt=whole_prompt)
        assert found.target >= found.floor


def test_without_a_chunk_budget_the_whole_prompt_is_in_flight() -> None:
    found = demand(window(4, 4), Phase.PREFILL, lengths(100), NO_PACE, whole_prompt=False)
    assert found == Demand(Pages(2), Pages(25))


def test_the_targets_of_a_leg_are_the_largest_of_its_phases() -> None:
    layout = Layout((full(16), window(512, 16)), True)
    pace = Pace(Tokens(512), 2, Tokens(32))
    size = lengths(5000, 100)
    assert targets(layout, Leg.SOURCE, size, pace) == (313, 97)
    assert targets(layout, Leg.TARGET, size, pace) == (319, 35)
    unflagged = Layout(layout.groups, False)
    assert targets(unflagged, Leg.SOURCE, size, pace) == (313, 313)
    assert targets(unflagged, Leg.WHOLE, size, pace) == (319, 97)


# --- Known figures ---


@pytest.mark.parametrize(
    ("tokens", "page", "ahead", "pages"),
    [
        (512, 16, 1, 33),
        (512, 16, 32, 35),
        (128, 256, 1, 2),
        (129, 128, 1, 2),
        (128, 1, 1, 128),
        (1, 16, 1, 1),
        (1, 1, 1, 1),
        (2, 16, 1, 2),
    ],
)
def test_known_decode_residencies(tokens: int, page: int, ahead: int, pages: int) -> None:
    group = window(tokens, page)
    pace = Pace(None, 1, Tokens(ahead))
    long = lengths(10_000, 10_000)
    assert demand(group, Phase.DECODE, long, pace, whole_prompt=False).target == pages
    assert longest_residency(group.reach, group.page_tokens, Tokens(ahead)) == pages


def test_known_prefill_and_hand_off_pages() -> None:
    group = window(512, 16)
    two_chunks = Pace(Tokens(512), 2, Tokens(1))
    found = demand(group, Phase.PREFILL, lengths(9000), two_chunks, whole_prompt=False)
    assert found == Demand(Pages(33), Pages(97))
    moved = [floor(group, Phase.HANDOFF, lengths(n)) for n in range(1, 2000)]
    assert max(moved) == 33 and min(moved[600:]) == 32
    # A small window pool does not turn away what fits it: 200 settled positions and 16 more.
    small = window(128, 8)
    assert small.span(small.first_needed(Tokens(200)), Tokens(216)) == 18


def test_the_last_token_takes_no_position() -> None:
    assert lengths(10, 1).end == 10
    assert floor(full(5), Phase.DECODE, lengths(10, 1)) == 2
    assert floor(full(5), Phase.DECODE, lengths(10, 2)) == 3


def test_one_token_has_no_decode_phase() -> None:
    layout = Layout((full(16), window(512, 16)), True)
    pace = Pace(Tokens(16), 1, Tokens(320))
    assert targets(layout, Leg.WHOLE, lengths(5000, 1), pace) == (313, 34)
    assert targets(layout, Leg.WHOLE, lengths(5000, 2), pace) == (313, 53)


def test_a_full_group_has_no_residency_of_its_own() -> None:
    with pytest.raises(AssertionError):
        longest_residency(All(), Tokens(16), Tokens(1))
