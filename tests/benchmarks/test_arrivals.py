"""Speed of streams from when their tokens came."""

import pytest

from arrivals import Arrivals

STEP_S = 0.1
SPREAD_S = 0.001  # From a launch's first token to its last.


def launches(arrivals: Arrivals, streams: list[int], count: int, begin: float) -> None:
    for launch in range(count):
        for place, stream in enumerate(streams):
            arrivals.note(stream, begin + launch * STEP_S + place * SPREAD_S / len(streams))


@pytest.mark.parametrize("stream_count", [1, 2, 8, 32])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_speed_is_exact_however_many_streams_share_a_launch(
    stream_count: int, is_reversed: bool
) -> None:
    arrivals = Arrivals(stream_count)
    streams = list(range(stream_count))
    if is_reversed:
        streams.reverse()
    launches(arrivals, streams, 12, 5.0)
    assert arrivals.steps(0) in (8, 9)
    assert arrivals.tokens_per_s() == pytest.approx(stream_count / STEP_S)


def test_time_before_the_last_stream_decodes_does_not_count() -> None:
    arrivals = Arrivals(2)
    for token in range(50):
        arrivals.note(0, token * 10.0)
        assert arrivals.steps(0) == 0
    launches(arrivals, [0, 1], 10, 600.0)
    assert arrivals.tokens_per_s() == pytest.approx(2 / STEP_S)
    assert 50 < 2 * arrivals.fed_tokens() < 80
