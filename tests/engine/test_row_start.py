"""What a bad start or bad growth costs: its own request, and nobody else's."""

import msgspec
import pytest

from fakes.row_operations import (
    apply_all,
    make_start,
    make_table,
)
from tidegate.engine.rows import Feed, Launch
from tidegate.ipc.protocol import Chunk, Grow, PageRun, Row, Start


def only_feed(launch: Launch) -> Feed:
    assert len(launch.feeds) == 1
    return launch.feeds[0]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (make_start(8), "not in 0 to 7"),
        (make_start(-1), "not in 0 to 7"),
        (make_start(tokens=()), "no list of uint32"),
        (make_start(tokens=(1, 100)), "not in the vocabulary"),
        (make_start(position=5, limit=5), "limit above its position"),
        (make_start(output_index=-1), "output index"),
        (make_start(full=(64,)), "page 64 is not in the pool of 64 pages"),
        (make_start(window=(32,)), "page 32 is not in the pool of 32 pages"),
        (make_start(window_from=2), "does not begin a page"),
        (make_start(window_from=4), "needs positions 0"),
        (make_start(position=9, tokens=(7,)), "needs positions 0 to 8"),
        (make_start(position=-4), "negative"),
        (make_start(window_from=-4), "negative"),
    ],
)
def test_a_bad_start_is_a_fault_of_its_request(start: Start, words: str) -> None:
    table = make_table()
    apply_all(table, start, make_start(5), Chunk(Row(5), 5, True))
    (fault,) = table.take_faults()
    assert fault.request_id == start.request_id
    assert fault.kind == "bad_plan"
    assert words in fault.text
    assert only_feed(table.next_launch()).row == 5


def test_bytes_that_are_no_ids_are_a_fault() -> None:
    table = make_table()
    good = make_start(0)
    for bad in (
        msgspec.structs.replace(good, tokens=b"abc"),
        msgspec.structs.replace(good, stop_ids=b"abc"),
        msgspec.structs.replace(good, pages=(PageRun(0, b"abc"), PageRun(0, b""))),
        msgspec.structs.replace(good, pages=(PageRun(0, b""),)),
    ):
        table.apply(bad)
    assert len(table.take_faults()) == 4
    assert len(table) == 0


def test_a_window_table_may_begin_where_the_window_does() -> None:
    table = make_table()
    # At position 13 the window reads from 8 on, which is where page 2 begins.
    table.apply(
        make_start(
            position=13,
            tokens=(7,),
            output_index=1,
            full=(1, 2, 3, 4),
            window=(5, 6),
            window_from=8,
        )
    )
    assert table.take_faults() == ()
    feed = only_feed(table.next_launch())
    assert [pages.first_page for pages in feed.pages] == [0, 2]
    assert [list(pages.ids) for pages in feed.pages] == [[1, 2, 3, 4], [5, 6]]


def test_two_starts_of_one_row_end_both_requests() -> None:
    table = make_table()
    first, second = make_start(0), make_start(0, tokens=(9,))
    apply_all(table, first, second)
    assert [fault.row for fault in table.take_faults()] == [0, 0]
    assert len(table) == 0


@pytest.mark.parametrize(
    "grow", [Grow(Row(0), 2, b""), Grow(Row(0), -1, b""), Grow(Row(0), 0, b"abc")]
)
def test_senseless_growth_is_a_fault(grow: Grow) -> None:
    table = make_table()
    apply_all(table, make_start(), grow)
    assert len(table.take_faults()) == 1
