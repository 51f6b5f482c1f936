"""Operations in, launches out: the row table without a model."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.row_operations import (
    EOS,
    LAYOUT,
    PAGE,
    apply_all,
    decoding_start,
    make_start,
    make_table,
)
from tidegate.engine.rows import CHUNKS_WAITING_MAX, Feed, Launch, RowTable
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Grow,
    Limit,
    RequestId,
    Row,
    RowEnd,
    Stop,
    Trim,
    Trimmed,
    pack_ids,
)
from tidegate.kvcache.layout import Pages, Tokens


def only_feed(launch: Launch) -> Feed:
    assert len(launch.feeds) == 1
    return launch.feeds[0]


def fed(feed: Feed) -> tuple[int, list[int], bool]:
    return feed.start, [int(token) for token in feed.tokens], feed.sample


def run_launch(table: RowTable, token: int = 50) -> tuple[Launch, list[RowEnd]]:
    """Settle one launch in which every row samples `token`."""
    launch = table.next_launch()
    ends = [table.settle(feed, token if feed.sample else None) for feed in launch.feeds]
    return launch, [end for end in ends if end is not None]


# --- Prefill ---


def test_a_prompt_waits_for_its_chunk() -> None:
    table = make_table()
    table.apply(make_start())
    assert table.next_launch() == Launch((), ())
    table.apply(Chunk(Row(0), until=5, sample=True))
    assert fed(only_feed(table.next_launch())) == (0, [1, 2, 3, 4, 5], True)


def test_a_prompt_of_one_token_waits_for_its_chunk_too() -> None:
    table = make_table()
    table.apply(make_start(tokens=(1,)))
    assert table.next_launch().feeds == ()
    table.apply(Chunk(Row(0), until=1, sample=True))
    assert fed(only_feed(table.next_launch())) == (0, [1], True)


def test_chunks_of_one_row_go_into_launches_one_after_another() -> None:
    table = make_table()
    apply_all(table, make_start(), Chunk(Row(0), 2, False), Chunk(Row(0), 5, True))
    first, _ = run_launch(table)
    second, _ = run_launch(table)
    assert fed(only_feed(first)) == (0, [1, 2], False)
    assert fed(only_feed(second)) == (2, [3, 4, 5], True)
    assert only_feed(first).is_chunk
    assert only_feed(second).is_chunk
    assert only_feed(first).end == 2


def test_a_row_decodes_by_itself_after_the_chunk_that_samples() -> None:
    table = make_table()
    apply_all(table, make_start(), Chunk(Row(0), 5, True))
    first, _ = run_launch(table, token=50)
    second, _ = run_launch(table, token=51)
    third = table.next_launch()
    assert only_feed(first).output_index == 0
    assert fed(only_feed(second)) == (5, [50], True)
    assert only_feed(second).output_index == 1
    assert not only_feed(second).is_chunk
    assert fed(only_feed(third)) == (6, [51], True)


def test_a_prefill_row_ends_at_its_limit_with_one_token() -> None:
    table = make_table()
    apply_all(table, make_start(limit=5), Chunk(Row(0), 5, True))
    _, ends = run_launch(table)
    assert ends == [RowEnd(Row(0), EndReason.LENGTH)]
    assert len(table) == 0


def test_a_last_chunk_that_does_not_sample_leaves_the_row_waiting() -> None:
    table = make_table()
    apply_all(table, make_start(limit=5), Chunk(Row(0), 5, False))
    _, ends = run_launch(table)
    assert ends == []
    assert Row(0) in table
    assert table.next_launch() == Launch((), ())


def test_a_resumed_row_with_several_tokens_waits_for_chunks() -> None:
    table = make_table()
    table.apply(make_start(tokens=(1, 2, 3, 50, 51), output_index=2))
    assert table.next_launch().feeds == ()
    table.apply(Chunk(Row(0), 5, True))
    assert only_feed(table.next_launch()).output_index == 2


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk(Row(0), 0, False), "does not end after position 0"),
        (Chunk(Row(0), 6, False), "by 5, where the row's tokens end"),
        (Chunk(Row(0), -3, False), "does not end after"),
        (Chunk(Row(0), 4, True), "cannot sample"),
    ],
)
def test_a_senseless_chunk_costs_its_row_a_fault(chunk: Chunk, words: str) -> None:
    table = make_table()
    apply_all(table, make_start(0), make_start(1), chunk, Chunk(Row(1), 5, True))
    (fault,) = table.take_faults()
    assert (fault.row, fault.request_id, fault.kind) == (0, "request-0", "bad_plan")
    assert words in fault.text
    assert only_feed(table.next_launch()).row == 1
    assert table.take_faults() == ()


def test_a_chunk_beyond_its_pages_is_a_fault_and_the_others_go_on() -> None:
    table = make_table()
    apply_all(
        table,
        make_start(0, full=(10,)),
        Chunk(Row(0), 5, True),
        make_start(1),
        Chunk(Row(1), 5, True),
    )
    assert only_feed(table.next_launch()).row == 1
    (fault,) = table.take_faults()
    assert fault.row == 0
    assert "goes beyond 4" in fault.text
    assert Row(0) not in table


def test_pages_that_come_after_the_chunk_in_the_same_plan_count() -> None:
    table = make_table()
    apply_all(
        table,
        make_start(0, full=(10,), window=(20,)),
        Chunk(Row(0), 5, True),
        Grow(Row(0), 0, pack_ids([12])),
        Grow(Row(0), 1, pack_ids([22])),
    )
    assert only_feed(table.next_launch()).end == 5


def test_a_chunk_beyond_the_limit_is_a_fault() -> None:
    table = make_table()
    apply_all(table, make_start(limit=4), Chunk(Row(0), 5, True))
    assert table.next_launch().feeds == ()
    assert "the limit is 4" in table.take_faults()[0].text


def test_chunks_that_wait_are_bounded() -> None:
    table = make_table()
    table.apply(make_start(tokens=(1,) * 80, limit=90))
    for until in range(1, CHUNKS_WAITING_MAX + 1):
        table.apply(Chunk(Row(0), until, False))
    assert table.take_faults() == ()
    table.apply(Chunk(Row(0), CHUNKS_WAITING_MAX + 1, False))
    assert len(table.take_faults()) == 1


# --- Decode ---


def test_a_row_after_a_hand_off_decodes_at_once() -> None:
    table = make_table()
    table.apply(decoding_start())
    feed = only_feed(table.next_launch())
    assert fed(feed) == (5, [7], True)
    assert feed.output_index == 1


def test_a_chunk_for_the_one_known_token_is_reported_as_a_chunk() -> None:
    table = make_table()
    apply_all(table, decoding_start(), Chunk(Row(0), 6, True))
    assert only_feed(table.next_launch()).is_chunk
    run_launch(table)
    assert not only_feed(table.next_launch()).is_chunk


def test_a_row_stops_itself_at_its_limit() -> None:
    table = make_table()
    table.apply(decoding_start(limit=7))
    assert run_launch(table)[1] == []
    assert run_launch(table)[1] == [RowEnd(Row(0), EndReason.LENGTH)]
    assert table.next_launch() == Launch((), ())


def test_a_row_without_a_page_in_one_group_is_starved_and_goes_on_when_it_comes() -> None:
    table = make_table()
    table.apply(decoding_start())
    for _ in range(3):
        run_launch(table)
    assert table.next_launch() == Launch((), (Row(0),))
    table.apply(Grow(Row(0), 0, pack_ids([12])))
    assert table.next_launch().starved == (0,)
    table.apply(Grow(Row(0), 1, pack_ids([22])))
    assert fed(only_feed(table.next_launch())) == (8, [50], True)


def test_a_starved_row_does_not_hold_up_the_others() -> None:
    table = make_table()
    starved = make_start(0, position=8, tokens=(7,), output_index=1)
    apply_all(table, starved, decoding_start(1))
    launch = table.next_launch()
    assert launch.starved == (0,)
    assert only_feed(launch).row == 1


def test_an_end_token_ends_the_row_and_comes_before_limit() -> None:
    table = make_table()
    table.apply(decoding_start(limit=6))
    assert run_launch(table, token=EOS)[1] == [RowEnd(Row(0), EndReason.END_TOKEN)]


def test_an_ignored_end_token_does_not_end_the_row() -> None:
    table = make_table()
    table.apply(make_start(position=5, tokens=(7,), output_index=1, ignore_eos=True))
    assert run_launch(table, token=EOS)[1] == []


def test_a_stop_id_ends_the_row_even_if_it_is_an_ignored_end_token() -> None:
    table = make_table()
    table.apply(
        make_start(position=5, tokens=(7,), output_index=1, stop_ids=(42, EOS), ignore_eos=True)
    )
    table.apply(make_start(1, position=5, tokens=(7,), output_index=1, stop_ids=(42,), limit=6))
    assert run_launch(table, token=42)[1] == [
        RowEnd(Row(0), EndReason.STOP_ID),
        RowEnd(Row(1), EndReason.STOP_ID),
    ]


def test_every_row_has_one_feed_and_they_keep_the_order_of_starts() -> None:
    table = make_table()
    apply_all(
        table,
        make_start(3),
        decoding_start(1),
        make_start(2),
        Chunk(Row(2), 2, False),
        Chunk(Row(2), 5, True),
        Chunk(Row(3), 5, True),
    )
    launch = table.next_launch()
    assert [feed.row for feed in launch.feeds] == [3, 1, 2]
    assert [fed(feed) for feed in table.next_launch().feeds] == [
        fed(feed) for feed in launch.feeds
    ]


# --- Limit, Stop, and what names no row ---


def test_a_row_sits_out_at_a_limit_until_another_one_comes() -> None:
    table = make_table()
    apply_all(table, decoding_start(), Limit(Row(0), 6))
    assert fed(only_feed(run_launch(table)[0])) == (5, [7], True)
    # It neither ends nor wants for pages.
    assert run_launch(table) == (Launch((), ()), [])
    table.apply(Limit(Row(0), 8))
    assert [only_feed(run_launch(table)[0]).start for _ in range(2)] == [6, 7]
    assert run_launch(table) == (Launch((), ()), [])
    table.apply(Limit(Row(0), 0))
    assert run_launch(table) == (Launch((), ()), []) and len(table) == 1


def test_no_limit_moves_the_end_of_a_row() -> None:
    table = make_table()
    apply_all(table, decoding_start(limit=6), Limit(Row(0), 100))
    assert run_launch(table)[1] == [RowEnd(Row(0), EndReason.LENGTH)]


def test_a_limit_does_not_touch_chunks() -> None:
    table = make_table()
    apply_all(table, make_start(), Limit(Row(0), 2), Chunk(Row(0), 5, True))
    assert fed(only_feed(run_launch(table)[0])) == (0, [1, 2, 3, 4, 5], True)
    assert run_launch(table) == (Launch((), ()), [])


@pytest.mark.parametrize(
    ("until", "counts"), [(0, (2, 1)), (8, (2, 1)), (9, (1, 0)), (12, (1, 0)), (13, (0, 0))]
)
def test_a_row_gives_up_the_pages_that_it_has_not_fed(
    until: int, counts: tuple[int, int]
) -> None:
    table = make_table()
    start = make_start(
        position=5, tokens=(7,), output_index=1, full=(1, 2, 3, 4), window=(5, 6, 7)
    )
    apply_all(table, start, Trim(Row(0), until))
    assert table.take_trimmed() == (Trimmed(Row(0), counts),)
    assert table.take_trimmed() == ()
    # It goes on in what it keeps, and after that in what it is granted anew.
    kept = 4 - counts[0], 3 - counts[1]
    run_launch(table)
    apply_all(table, Grow(Row(0), 0, pack_ids([30])), Grow(Row(0), 1, pack_ids([31])))
    pages = only_feed(table.next_launch()).pages
    assert [page.ids.tolist() for page in pages] == [
        [*[1, 2, 3, 4][: kept[0]], 30],
        [*[5, 6, 7][: kept[1]], 31],
    ]


def test_a_row_keeps_a_page_for_its_next_position_and_for_chunks_that_wait() -> None:
    table = make_table()
    apply_all(table, decoding_start(), Trim(Row(0), 0))
    assert table.take_trimmed() == (Trimmed(Row(0), (0, 0)),)
    run_launch(table)
    apply_all(table, make_start(1, full=(1, 2, 3), window=(4, 5, 6)), Chunk(Row(1), 5, True))
    table.apply(Trim(Row(1), 0))
    assert table.take_trimmed() == (Trimmed(Row(1), (1, 1)),)
    assert [feed.row for feed in table.next_launch().feeds] == [0, 1]


def test_stop_forgets_a_row_in_every_state() -> None:
    table = make_table()
    apply_all(table, make_start(0), make_start(1), Chunk(Row(1), 2, False), decoding_start(2))
    for row in range(3):
        table.apply(Stop(Row(row)))
    assert table.next_launch() == Launch((), ())
    assert len(table) == 0
    apply_all(table, Stop(Row(0)), Stop(Row(700)))
    assert table.ignored_count == 0
    assert table.take_faults() == ()


def test_operations_for_a_row_that_is_gone_are_ignored_and_counted() -> None:
    table = make_table()
    apply_all(
        table,
        Grow(Row(0), 0, b"bad"),
        Limit(Row(0), 3),
        Chunk(Row(5), 3, True),
        Grow(Row(-1), 0, b""),
    )
    assert table.ignored_count == 4
    assert table.take_faults() == ()


def test_a_result_for_a_row_that_was_stopped_and_started_again_is_dropped() -> None:
    table = make_table()
    table.apply(decoding_start())
    feed = only_feed(table.next_launch())
    apply_all(table, Stop(Row(0)))
    assert table.settle(feed, 50) is None
    table.apply(msgspec.structs.replace(make_start(0), request_id=RequestId("other")))
    assert table.settle(feed, 50) is None
    table.apply(Chunk(Row(0), 5, True))
    assert only_feed(table.next_launch()).request_id == "other"


def test_window_pages_below_the_window_are_forgotten_as_positions_settle() -> None:
    table = make_table()
    tokens = tuple(range(1, 17))
    table.apply(make_start(tokens=tokens, full=(1, 2, 3, 4), window=(5, 6, 7, 8)))
    for until in (4, 8, 12, 16):
        table.apply(Chunk(Row(0), until, until == 16))
    # The window reaches 5 positions back: from 4, 8 and 12 to pages 0, 0 and 1.
    first_pages: list[int] = []
    for _ in range(4):
        launch, _ = run_launch(table)
        first_pages.append(only_feed(launch).pages[1].first_page)
    assert first_pages == [0, 0, 0, 1]
    # From 16 to page 2.
    table.apply(Grow(Row(0), 0, pack_ids([9])))
    table.apply(Grow(Row(0), 1, pack_ids([9])))
    run = only_feed(table.next_launch()).pages[1]
    assert (run.first_page, list(run.ids)) == (2, [7, 8, 9])


@given(
    prompt=st.integers(1, 40),
    cuts=st.sets(st.integers(1, 39)),
    outputs=st.integers(1, 20),
    grants=st.lists(st.integers(0, 2), max_size=30),
)
def test_each_position_is_fed_once_in_order_and_within_its_pages(
    prompt: int, cuts: set[int], outputs: int, grants: list[int]
) -> None:
    table = make_table()
    limit = prompt + outputs - 1
    pages = -(-prompt // PAGE)
    table.apply(
        make_start(
            tokens=tuple(t % 90 for t in range(prompt)),
            limit=limit,
            full=tuple(range(pages)),
            window=tuple(range(pages)),
        )
    )
    for until in [*sorted(cut for cut in cuts if cut < prompt), prompt]:
        table.apply(Chunk(Row(0), until, until == prompt))
    position, sampled, held = 0, 0, [pages, pages]
    ended: list[RowEnd] = []
    # Pages come in a random order at first, then as many as the row needs.
    for grant in [*grants, *[0, 1] * 20, *[2] * (limit + len(cuts) + 2)]:
        if grant < 2 and held[grant] < -(-limit // PAGE):
            table.apply(Grow(Row(0), grant, pack_ids([held[grant]])))
            held[grant] += 1
        launch, ends = run_launch(table)
        for feed in launch.feeds:
            assert feed.start == position
            position = feed.end
            assert position <= min(min(held) * PAGE, limit)
            for group, table_pages in zip(LAYOUT.groups, feed.pages, strict=True):
                assert group.start_of(Pages(table_pages.first_page)) <= group.first_needed(
                    Tokens(feed.start)
                )
                assert np.array_equal(
                    table_pages.ids,
                    np.arange(
                        table_pages.first_page, len(table_pages.ids) + table_pages.first_page
                    ),
                )
            sampled += feed.sample
        if launch.starved:
            assert min(held) * PAGE == position < limit
        ended += ends
    assert (position, sampled) == (limit, outputs)
    assert ended == [RowEnd(Row(0), EndReason.LENGTH)]
