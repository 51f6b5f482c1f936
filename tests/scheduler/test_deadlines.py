"""In every phase a request waits for a bounded time, counted from its last named event."""

from fakes.core_bench import (
    QUEUE_US,
    STALL_US,
    B,
    CoreBench,
    D,
    P,
    cancelled,
    finished,
    joined,
    report,
    submitted,
)
from tidegate.ipc.protocol import EndReason, Role
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings

COUNTS = (12, 6)
ROOMY = (40, 12)
LONG_STALL = CoreSettings(stall_timeout_us=100 * QUEUE_US, queue_timeout_us=QUEUE_US)


def pair() -> CoreBench:
    return CoreBench(joined(P, Role.PREFILL, COUNTS), joined(D, Role.DECODE, COUNTS))


def one_row(settings: CoreSettings) -> CoreBench:
    """A worker whose only row is taken."""
    bench = CoreBench(joined(B, Role.BOTH, COUNTS, rows=1), settings=settings)
    bench.turn(submitted("runs", 8, 20))
    return bench


def ends_at(bench: CoreBench, name: str, at_us: int) -> str:
    """Nothing happens before `at_us`, and then the request times out; returns why."""
    bench.now_us = at_us - 1
    assert name not in finished(bench.turn())
    wake_us = bench.core.wake_us
    assert wake_us is not None and wake_us <= at_us
    bench.now_us = at_us
    answer = finished(bench.turn())[name]
    assert (answer.reason, answer.status) == (EndReason.TIMEOUT, 503)
    return answer.text


def test_a_request_waits_in_the_queue_for_the_queue_timeout() -> None:
    bench = one_row(LONG_STALL)
    bench.now_us = 5
    bench.turn(submitted("r", 8, 4))
    text = ends_at(bench, "r", 5 + QUEUE_US)
    assert text == "it waited 60 s in the queue, which is the limit"
    assert bench.phase("runs") is Phase.PREFILLING


def test_its_own_timeout_takes_the_place_of_the_queue_timeout() -> None:
    bench = one_row(LONG_STALL)
    bench.turn(submitted("short", 8, 4, timeout_ms=100))
    bench.turn(submitted("long", 8, 4, timeout_ms=2 * QUEUE_US // 1000))
    text = ends_at(bench, "short", 100_000)
    assert text == "its own timeout of 0.1 s passed before its first token"
    bench.now_us = QUEUE_US
    bench.turn()
    assert bench.phase("long") is Phase.WAITING
    ends_at(bench, "long", 2 * QUEUE_US)


def test_its_own_timeout_holds_until_the_first_token() -> None:
    bench = pair()
    bench.turn(submitted("r", 16, 4, timeout_ms=100))
    bench.turn(report(P, 1, chunks={0: 8}))
    ends_at(bench, "r", 100_000)


def test_its_own_timeout_ends_with_the_first_token() -> None:
    bench = pair()
    bench.turn(submitted("r", 8, 4, timeout_ms=100))
    done = report(P, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    bench.turn(done)
    bench.now_us = 200_000
    bench.turn()
    assert bench.phase("r") is Phase.HANDING_OFF


def busy_elsewhere(bench: CoreBench, until_us: int) -> None:
    """The worker B makes progress on request "other", and none on "r"."""
    step_us = STALL_US // 2
    while bench.now_us + step_us < until_us:
        bench.now_us += step_us
        bench.turn(report(B, bench.worker(B).seq, tokens={0: 1}))


def test_a_chunk_that_is_never_answered_ends_its_request_though_the_worker_goes_on() -> None:
    bench = CoreBench(joined(B, Role.BOTH, ROOMY))
    bench.decode_whole("other", 8, 30)
    bench.turn(submitted("r", 16, 4))
    busy_elsewhere(bench, STALL_US)
    text = ends_at(bench, "r", STALL_US)
    assert text == "worker b brought nothing of it for 10 s, which is the limit"
    assert not bench.worker(B).is_suspect and bench.phase("other") is Phase.DECODING


def test_each_token_gives_a_decoding_request_its_time_anew() -> None:
    bench = CoreBench(joined(B, Role.BOTH, ROOMY))
    bench.decode_whole("other", 8, 30)
    bench.decode_whole("r", 8, 30)
    bench.now_us = STALL_US * 9 // 10
    bench.turn(report(B, bench.worker(B).seq, tokens={0: 1, 1: 1}))
    since_us = bench.now_us
    busy_elsewhere(bench, since_us + STALL_US)
    ends_at(bench, "r", since_us + STALL_US)
    assert bench.phase("other") is Phase.DECODING


def test_a_pull_that_is_never_answered_ends_though_the_worker_goes_on() -> None:
    bench = CoreBench(joined(P, Role.PREFILL, ROOMY), joined(D, Role.DECODE, ROOMY))
    bench.hand_over("other", 8, 30)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("r", 8, 4)
    bench.now_us = STALL_US - 2
    bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    ends_at(bench, "r", STALL_US)
    assert not bench.worker(D).is_suspect and bench.phase("other") is Phase.DECODING


def test_a_finished_prompt_waits_for_room_for_the_queue_timeout() -> None:
    settings = CoreSettings(stall_timeout_us=STALL_US, queue_timeout_us=QUEUE_US)
    bench = CoreBench(
        joined(P, Role.PREFILL, COUNTS), joined(D, Role.DECODE, COUNTS), settings=settings
    )
    bench.hand_over("other", 16, 33)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("r", 8, 20)
    for step in range(1, 7):
        bench.now_us = step * STALL_US * 95 // 100
        bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    text = ends_at(bench, "r", QUEUE_US)
    assert text == "it waited 60 s for room on a decode worker, which is the limit"


def test_a_prompt_waits_for_its_turn_for_the_queue_timeout() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (100, 20)),
        settings=CoreSettings(
            stall_timeout_us=STALL_US, queue_timeout_us=QUEUE_US, chunk_tokens=Tokens(20)
        ),
    )
    bench.turn(submitted("r", 8, 4), submitted("first", 300, 4, priority=1))
    for step in range(1, 7):
        bench.now_us = step * STALL_US * 95 // 100
        seat = bench.worker(B).seats[bench.row_of("first")]
        assert seat.chunk_until is not None
        bench.turn(report(B, bench.worker(B).seq, chunks={seat.row: seat.chunk_until}))
    text = ends_at(bench, "r", QUEUE_US)
    assert text == "it waited 60 s for its prompt's next turn, which is the limit"


def test_the_timers_of_ended_requests_are_swept_out() -> None:
    bench = one_row(LONG_STALL)
    for index in range(1000):
        bench.turn(submitted(f"r{index}", 8, 4))
        bench.turn(cancelled(f"r{index}"))
    assert len(bench.core.fleet.timers) < 200
    bench.turn(cancelled("runs"))
    bench.now_us = QUEUE_US
    bench.turn(report(B, 2))
    assert bench.core.is_idle and bench.core.wake_us is None
