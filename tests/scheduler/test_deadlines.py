"""In every phase a request waits for a bounded time, counted from its last named event."""

from fakes.core_bench import (
    FULL_ONLY,
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
from tidegate.ipc.protocol import EndReason, RequestId, Role
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.prefill_speed import SAMPLE_COUNT_MAX
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


# --- In all ---


def ends_in_all(bench: CoreBench, name: str, output_tokens: int) -> None:
    """It times out 100 ms after its receipt, which was at 0, and its tokens count."""
    bench.now_us = 99_999
    assert name not in finished(bench.turn())
    wake_us = bench.core.wake_us
    assert wake_us is not None and wake_us <= 100_000
    bench.now_us = 100_000
    answer = finished(bench.turn())[name]
    assert (answer.reason, answer.status) == (EndReason.TIMEOUT, 503)
    tokens = "1 token" if output_tokens == 1 else f"{output_tokens} tokens"
    assert answer.text == f"its own timeout of 0.1 s in all passed after {tokens}"
    assert answer.usage.output_tokens == output_tokens


def test_its_timeout_in_all_holds_in_the_queue() -> None:
    bench = one_row(LONG_STALL)
    bench.turn(submitted("r", 8, 4, total_timeout_ms=100))
    ends_in_all(bench, "r", 0)


def test_its_timeout_in_all_holds_while_its_prompt_runs() -> None:
    bench = pair()
    bench.turn(submitted("r", 16, 4, total_timeout_ms=100))
    bench.turn(report(P, 1, chunks={0: 8}))
    ends_in_all(bench, "r", 0)


def test_its_timeout_in_all_holds_while_it_waits_for_a_destination() -> None:
    bench = pair()
    bench.hand_over("other", 16, 25)
    bench.turn(report(P, bench.worker(P).seq))
    bench.turn(submitted("r", 8, 20, total_timeout_ms=100))
    row, seq = bench.row_of("r"), bench.worker(P).seq
    bench.turn(report(P, seq, chunks={row: 8}, tokens={row: 1}, ended={row: EndReason.LENGTH}))
    assert bench.phase("r") is Phase.HANDING_OFF
    ends_in_all(bench, "r", 1)


def test_its_timeout_in_all_holds_while_it_decodes() -> None:
    bench = CoreBench(joined(B, Role.BOTH, ROOMY))
    bench.turn(submitted("r", 8, 30, total_timeout_ms=100))
    bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}))
    for count in range(2, 6):
        bench.now_us += 10_000
        bench.turn(report(B, bench.worker(B).seq, tokens={0: 1}))
        assert bench.core.fleet.requests[RequestId("r")].output_count == count
    ends_in_all(bench, "r", 5)


def test_its_timeout_in_all_holds_after_it_gave_way_and_the_first_one_does_not() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (5,), FULL_ONLY, rows=2))
    bench.turn(
        submitted("a", 4, 12), submitted("r", 4, 12, timeout_ms=50, total_timeout_ms=100)
    )
    bench.turn(report(B, 1, chunks={0: 4, 1: 4}, tokens={0: 1, 1: 1}))
    while bench.phase("r") is Phase.DECODING:
        bench.turn(report(B, bench.worker(B).seq, tokens={0: 1, 1: 1}))
    count = bench.core.fleet.requests[RequestId("r")].output_count
    assert bench.phase("r") is Phase.WAITING and count > 1
    ends_in_all(bench, "r", count)


def test_the_nearer_of_its_own_timeouts_ends_it() -> None:
    bench = one_row(LONG_STALL)
    bench.turn(submitted("r", 8, 4, timeout_ms=100, total_timeout_ms=50))
    assert (
        ends_at(bench, "r", 50_000) == "its own timeout of 0.05 s in all passed after 0 tokens"
    )


# --- What can no longer be in time ---

TURN_US = 10_000


def measured(*, rows: int = 4, pages: int = 60) -> CoreBench:
    """A worker that was seen to run 8 prompt tokens in 10 ms: of 80, one at twice the speed
    takes 50 ms."""
    bench = CoreBench(joined(B, Role.BOTH, (pages,), FULL_ONLY, rows=rows), settings=LONG_TURNS)
    bench.turn(submitted("seen", 8, 1))
    done = report(
        B, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.LENGTH}, busy_us=TURN_US
    )
    bench.turn(done)
    bench.turn(report(B, bench.worker(B).seq))
    return bench


LONG_TURNS = CoreSettings(
    stall_timeout_us=STALL_US, queue_timeout_us=QUEUE_US, chunk_tokens=Tokens(8)
)


def test_a_prompt_that_cannot_be_in_time_is_not_begun() -> None:
    bench = measured()
    commands = bench.turn(submitted("late", 80, 4, timeout_ms=50), submitted("r", 80, 4))
    answer = finished(commands)["late"]
    assert (answer.reason, answer.status) == (EndReason.TIMEOUT, 503)
    assert answer.text == (
        "its own timeout of 0.05 s would have passed before its first token: the rest of its "
        "prompt takes more than 0.05 s"
    )
    assert bench.phase("r") is Phase.PREFILLING
    bench.turn(submitted("in time", 80, 4, timeout_ms=51))
    assert bench.phase("in time") is Phase.PREFILLING


def test_the_timeout_in_all_counts_as_well_where_it_is_nearer() -> None:
    bench = measured()
    late = submitted("late", 80, 4, timeout_ms=500, total_timeout_ms=50)
    assert finished(bench.turn(late))["late"].text == (
        "its own timeout of 0.05 s in all would have passed after 0 tokens: the rest of its "
        "prompt takes more than 0.05 s"
    )


def test_only_what_is_not_cached_takes_time() -> None:
    bench = measured()
    hashes = [bytes([index]) for index in range(20)]
    bench.turn(submitted("first", 80, 1, hashes=hashes))
    while bench.phase("first") is Phase.PREFILLING:
        seat = bench.worker(B).seats[bench.row_of("first")]
        assert seat.chunk_until is not None
        is_last = seat.chunk_until == 80
        bench.turn(
            report(
                B,
                bench.worker(B).seq,
                chunks={seat.row: seat.chunk_until},
                tokens={seat.row: 1} if is_last else None,
                ended={seat.row: EndReason.LENGTH} if is_last else None,
            )
        )
    bench.turn(submitted("again", 80, 4, timeout_ms=50, hashes=hashes))
    assert bench.phase("again") is Phase.PREFILLING


def test_nothing_is_given_up_before_a_speed_is_known() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (60,), FULL_ONLY), settings=LONG_TURNS)
    bench.turn(submitted("r", 80, 4, timeout_ms=1))
    assert bench.phase("r") is Phase.PREFILLING


def test_a_small_launch_tells_nothing_of_the_speed() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (60,), FULL_ONLY), settings=LONG_TURNS)
    bench.turn(submitted("seen", 3, 1))
    bench.turn(
        report(B, 1, chunks={0: 3}, tokens={0: 1}, ended={0: EndReason.LENGTH}, busy_us=TURN_US)
    )
    bench.turn(submitted("r", 80, 4, timeout_ms=1))
    assert bench.phase("r") is Phase.PREFILLING


def test_the_best_of_the_workers_and_of_the_last_launches_counts() -> None:
    bench = measured()
    speed = bench.worker(B).prefill_speed
    speed.note(8, 100 * TURN_US)
    assert speed.least_us(80) == 5 * TURN_US
    speed.note(8, TURN_US // 2)
    assert speed.least_us(80) == 5 * TURN_US // 2
    for _ in range(SAMPLE_COUNT_MAX):
        speed.note(8, 4 * TURN_US)
    assert speed.least_us(80) == 20 * TURN_US
    bench.turn(joined(P, Role.BOTH, (60,), FULL_ONLY))  # Of this one nothing is known.
    bench.turn(submitted("r", 80, 4, timeout_ms=1))
    assert bench.phase("r") is Phase.PREFILLING


def test_a_prompt_that_falls_behind_is_not_gone_on_with() -> None:
    bench = measured()
    bench.turn(submitted("r", 80, 4, timeout_ms=60))
    row = bench.row_of("r")
    bench.now_us = 14_999
    bench.turn(report(B, bench.worker(B).seq, chunks={row: 8}, busy_us=TURN_US))
    assert bench.phase("r") is Phase.PREFILLING
    # 64 tokens are left, for which 40 ms are needed at least.
    bench.now_us = 20_000
    commands = bench.turn(report(B, bench.worker(B).seq, chunks={row: 16}, busy_us=TURN_US))
    answer = finished(commands)["r"]
    assert answer.reason is EndReason.TIMEOUT and "takes more than 0.04 s" in answer.text


def test_a_prompt_that_waits_too_long_for_its_turn_is_not_gone_on_with() -> None:
    bench = measured()
    bench.turn(submitted("first", 80, 4, priority=1), submitted("r", 80, 4, timeout_ms=60))
    assert bench.phase("r") is Phase.PREFILLING
    assert "takes more than 0.05 s" in ends_at(bench, "r", 10_000)


def test_who_gave_way_is_not_begun_anew_if_it_cannot_be_in_time() -> None:
    bench = measured(rows=2, pages=5)
    bench.turn(submitted("a", 4, 12), submitted("r", 4, 12, total_timeout_ms=10))
    bench.turn(report(B, bench.worker(B).seq, chunks={1: 4, 0: 4}, tokens={1: 1, 0: 1}))
    while bench.phase("r") is Phase.DECODING:
        bench.turn(report(B, bench.worker(B).seq, tokens={1: 1, 0: 1}))
    count = bench.core.fleet.requests[RequestId("r")].output_count
    bench.now_us = 9_000
    answer = finished(bench.turn(cancelled("a")))["r"]
    assert f"would have passed after {count} tokens" in answer.text
    assert answer.usage.output_tokens == count


# --- Workers that owe an answer ---


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
