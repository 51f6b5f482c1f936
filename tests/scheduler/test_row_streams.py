"""Tokens of a worker's rows, joined to the streams that they are for."""

import numpy as np
import pytest

from tidegate.ipc.protocol import (
    RequestId,
    Row,
    Sampling,
    StreamId,
    Submit,
    pack_ids,
    unpack_ids,
)
from tidegate.scheduler.row_streams import LATEST_COUNT_MAX, RowStreams, Sampled
from tidegate.scheduler.streams import Stream, Streams


def stream(streams: Streams, number: int, peer: bytes = b"one") -> Stream:
    submit = Submit(RequestId(f"r{number}"), "", pack_ids([9]), 500, Sampling(), 7)
    made = Stream(RequestId(f"e-{number}"), StreamId(number), peer, submit, Sampling())
    streams.add(made)
    return made


def sampled(tokens: dict[int, list[int]]) -> Sampled:
    return Sampled(
        np.array(list(tokens), np.uint32),
        np.array([len(ids) for ids in tokens.values()], np.uint32),
        np.array([token for ids in tokens.values() for token in ids], np.uint32),
    )


def deliver(
    rows: RowStreams, tokens: dict[int, list[int]], first_index: int = 0
) -> list[tuple[bytes, list[int], list[int], list[int], list[int]]]:
    """For each connection: streams, first indexes, counts and tokens."""
    first_indexes = np.arange(first_index, first_index + len(tokens), dtype=np.uint32)
    return [
        (
            each.peer,
            list(unpack_ids(each.streams)),
            list(unpack_ids(each.first_indexes)),
            list(unpack_ids(each.counts)),
            list(unpack_ids(each.tokens)),
        )
        for each in rows.deliver(sampled(tokens), first_indexes)
    ]


def test_all_rows_of_one_connection_are_one_delivery() -> None:
    streams, rows = Streams(), RowStreams(4)
    for row, number in ((0, 30), (3, 31), (1, 32)):
        rows.begin(Row(row), stream(streams, number))
    assert deliver(rows, {3: [5], 0: [6], 1: [7]}, 40) == [
        (b"one", [31, 30, 32], [40, 41, 42], [1, 1, 1], [5, 6, 7])
    ]


@pytest.mark.parametrize("more", [[], [9]])
def test_rows_of_several_connections_are_a_delivery_each(more: list[int]) -> None:
    streams, rows = Streams(), RowStreams(4)
    for row, peer in enumerate((b"one", b"two", b"one", b"three")):
        rows.begin(Row(row), stream(streams, 30 + row, peer))
    tokens = {3: [5], 2: [6, *more], 1: [7], 0: [8]}
    assert deliver(rows, tokens, 40) == [
        (b"one", [32, 30], [41, 43], [1 + len(more), 1], [6, *more, 8]),
        (b"two", [31], [42], [1], [7]),
        (b"three", [33], [40], [1], [5]),
    ]


def test_a_stream_has_all_its_tokens_in_order_however_they_came() -> None:
    streams, rows = Streams(), RowStreams(2)
    first, second = stream(streams, 1), stream(streams, 2)
    rows.begin(Row(0), first)
    rows.begin(Row(1), second)
    count = 0
    expected: list[int] = []
    for turn in range(3 * LATEST_COUNT_MAX):
        several = 1 + 4 * (turn % 50 == 49)
        ids = list(range(count, count + several))
        deliver(rows, {1: ids, 0: [7]})
        expected += ids
        count += several
        if turn in (0, 70):
            assert unpack_ids(second.output) == tuple(expected)
    assert unpack_ids(second.output) == tuple(expected)
    assert unpack_ids(first.output) == (7,) * 3 * LATEST_COUNT_MAX


def test_a_stream_that_moves_to_another_row_keeps_its_tokens() -> None:
    streams, source, target = Streams(), RowStreams(2), RowStreams(2)
    one = stream(streams, 1)
    source.begin(Row(1), one)
    deliver(source, {1: [11]})
    target.begin(Row(0), one)
    deliver(target, {0: [12]})
    # The row's next user brings tokens of its own.
    other = stream(streams, 2)
    source.begin(Row(1), other)
    assert deliver(source, {1: [99]})[0][1] == [2]
    target.begin(Row(1), one)
    deliver(target, {1: [13]})
    assert unpack_ids(one.output) == (11, 12, 13)
    assert unpack_ids(other.output) == (99,)


def test_a_row_whose_stream_has_ended_keeps_nothing_for_the_next() -> None:
    streams, rows = Streams(), RowStreams(1)
    one = stream(streams, 1)
    rows.begin(Row(0), one)
    deliver(rows, {0: [11]})
    streams.remove(one.request_id)
    two = stream(streams, 2)
    rows.begin(Row(0), two)
    deliver(rows, {0: [12]})
    assert (unpack_ids(one.output), unpack_ids(two.output)) == ((11,), (12,))


def test_connections_are_told_apart_after_others_have_gone() -> None:
    streams, rows = Streams(), RowStreams(2)
    for number, peer in enumerate((b"one", b"two")):
        stream(streams, number, peer)
    streams.remove(RequestId("e-0"))
    rows.begin(Row(0), stream(streams, 5, b"one"))
    rows.begin(Row(1), stream(streams, 6, b"two"))
    assert [each[0] for each in deliver(rows, {0: [1], 1: [1]})] == [b"two", b"one"]


def test_rows_that_are_left_out_take_their_tokens_with_them() -> None:
    found = sampled({3: [5, 6], 1: [7], 2: [8, 9]}).only(np.array([True, False, True]))
    assert found.rows.tolist() == [3, 2] and found.tokens.tolist() == [5, 6, 8, 9]


@pytest.mark.parametrize(
    ("rows", "counts", "tokens", "text"),
    [
        ([0, 1], [1], [5], "do not agree"),
        ([0], [2], [5], "do not agree"),
        ([], [], [5], "do not agree"),
        ([2**32 - 1], [1], [5], f"row {2**32 - 1} is not one of its 4 rows"),
        ([0, 4], [1, 1], [5, 6], "row 4 is not one of its 4 rows"),
        ([2, 0, 2], [1, 1, 1], [5, 6, 7], "row 2 is named twice"),
    ],
)
def test_a_report_whose_lists_cannot_be_is_told_why(
    rows: list[int], counts: list[int], tokens: list[int], text: str
) -> None:
    lists = [np.array(values, np.uint32) for values in (rows, counts, tokens)]
    fault = Sampled(*lists).fault(4)
    assert fault is not None and text in fault
    assert sampled({3: [1], 0: [2, 2]}).fault(4) is None
