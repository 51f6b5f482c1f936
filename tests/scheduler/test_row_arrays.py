"""Rows in arrays: those below their next event move together, and the others not at all."""

from random import Random

import numpy as np
import pytest

from tidegate.ipc.protocol import Row
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.row_arrays import NO_EVENT, RowArrays

PROMPT = Tokens(10)


def rows_at(*next_events: int, output_count: int = 1) -> RowArrays:
    """Rows with a prompt of ten tokens that decode, each up to its own event."""
    arrays = RowArrays(len(next_events))
    for index, next_event in enumerate(next_events):
        row = Row(index)
        settled = Tokens(PROMPT - 1 + output_count)
        arrays.take(row, settled=settled, prompt=PROMPT, output_count=output_count, token_us=5)
        arrays.next_event[row] = next_event
    return arrays


def advance(arrays: RowArrays, tokens: dict[int, int]) -> tuple[list[int], list[int]]:
    rows, counts = list(tokens), list(tokens.values())
    first, left = arrays.advance(np.array(rows, np.int64), np.array(counts, np.int64), 77)
    return first.tolist(), list(left)


def test_rows_below_their_event_move_together() -> None:
    arrays = rows_at(20, 20, 20)
    assert advance(arrays, {2: 1, 0: 3}) == ([1, 1], [])
    assert arrays.settled.tolist() == [13, 10, 11]
    assert arrays.output_count.tolist() == [4, 1, 2]
    assert arrays.token_us.tolist() == [77, 5, 77]
    assert advance(arrays, {0: 1, 1: 1, 2: 1}) == ([4, 1, 2], [])


def test_a_row_that_comes_to_its_event_is_left_as_it_is() -> None:
    arrays = rows_at(12, 13, 12)
    assert advance(arrays, {0: 2, 1: 2, 2: 1}) == ([1, 1, 1], [0])
    assert arrays.settled.tolist() == [10, 12, 11]
    assert arrays.output_count.tolist() == [1, 3, 2]
    assert arrays.token_us.tolist() == [5, 77, 77]


@pytest.mark.parametrize("count", [0, 2**32 - 1])
def test_an_answer_that_cannot_be_is_left(count: int) -> None:
    arrays = rows_at(100, 100)
    assert advance(arrays, {0: count, 1: 1}) == ([1, 1], [0])
    assert arrays.output_count.tolist() == [1, 2]


def test_a_row_of_nobody_is_left_whatever_it_was() -> None:
    arrays = rows_at(100, 100)
    arrays.release(Row(1))
    assert advance(arrays, {1: 1, 0: 1})[1] == [0]
    # Its next user begins without an event, too.
    arrays.take(Row(1), settled=Tokens(0), prompt=Tokens(1), output_count=0, token_us=0)
    assert arrays.next_event[1] == NO_EVENT and advance(arrays, {1: 1})[1] == [0]


def test_many_reports_come_to_the_same_as_one_row_at_a_time() -> None:
    dice = Random(0)
    for _ in range(200):
        events = [dice.choice([0, 11, 12, 15, 40]) for _ in range(dice.randint(1, 9))]
        arrays = rows_at(*events)
        output = [1] * len(events)
        for _ in range(6):
            rows = dice.sample(range(len(events)), dice.randint(1, len(events)))
            tokens = {row: dice.randint(0, 3) for row in rows}
            before = [output[row] for row in rows]
            stays = [
                at
                for at, (row, count) in enumerate(tokens.items())
                if count == 0 or PROMPT - 1 + output[row] + count >= events[row]
            ]
            for at, (row, count) in enumerate(tokens.items()):
                output[row] += 0 if at in stays else count
            assert advance(arrays, tokens) == (before, stays)
            assert arrays.output_count.tolist() == output
            assert arrays.settled.tolist() == [PROMPT - 1 + count for count in output]
