"""A full queue: who is told to come back, and when."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    cancelled,
    joined,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, Role
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import Command, RefuseRequest
from tidegate.scheduler.rates import HALF_LIFE_US, Rate
from tidegate.scheduler.settings import CoreSettings


def busy(**settings: int | dict[str, float]) -> CoreBench:
    """The only row is taken, by a request of a tenant of its own."""
    bench = CoreBench(
        joined(B, Role.BOTH, (500,), FULL_ONLY, rows=1),
        settings=CoreSettings(chunk_tokens=Tokens(2000), **settings),  # type: ignore[arg-type] # By name.
    )
    bench.turn(submitted("runs", 4, 4, tenant="runs"))
    return bench


def send(bench: CoreBench, *names: str, prompt: int = 10) -> list[RefuseRequest]:
    """Submit requests whose tenant is their first letter; returns the refusals."""
    commands = bench.turn(*(submitted(n, prompt, 4, tenant=n[0]) for n in names))
    return refused(commands)


def refused(commands: list[Command]) -> list[RefuseRequest]:
    return [command for command in commands if isinstance(command, RefuseRequest)]


def test_who_meets_the_bound_of_its_own_tenant_is_answered_429_and_others_are_not() -> None:
    bench = busy(tenant_waiting_count_max=2)
    assert send(bench, "a1", "a2") == []
    (answer,) = send(bench, "a3", "b1")
    assert (answer.request_id, answer.status, answer.code) == ("a3", 429, "tenant_queue_full")
    assert answer.text == "2 requests of tenant 'a' are waiting already, and no more may"
    bench.turn(cancelled("a1"))
    assert send(bench, "a4", "b2") == []


def test_those_without_a_tenant_are_one() -> None:
    bench = busy(tenant_waiting_count_max=1)
    bench.turn(submitted("r1", 4, 4))
    (answer,) = refused(bench.turn(submitted("r2", 4, 4)))
    assert (
        answer.text
        == "1 request of those who name no tenant is waiting already, and no more may"
    )


def test_tokens_of_prompts_are_bounded_too() -> None:
    bench = busy(tenant_waiting_tokens_max=1000, waiting_tokens_max=2500)
    assert send(bench, "a1", "b1", prompt=900) == []
    (answer,) = send(bench, "a2", prompt=101)
    assert (answer.status, answer.text) == (
        429,
        "prompts of tenant 'a' with 900 tokens are waiting already; with the 101 of this one "
        "it would be more than 1,000",
    )
    assert send(bench, "a3", prompt=100) == []
    (answer,) = send(bench, "c1", prompt=601)
    assert (answer.status, answer.code) == (503, "queue_full")
    assert send(bench, "c2", prompt=600) == []


def test_a_prompt_larger_than_the_bound_is_taken_when_no_other_waits() -> None:
    bench = busy(tenant_waiting_tokens_max=100, waiting_tokens_max=100)
    assert send(bench, "a1", prompt=500) == []
    assert [answer.status for answer in send(bench, "a2", "b1", prompt=1)] == [429, 503]


def test_one_who_gave_way_counts_though_it_may_exceed_the_bound() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (5,), FULL_ONLY, rows=2),
        settings=CoreSettings(ahead_tokens=Tokens(1), tenant_waiting_count_max=1),
    )
    bench.turn(submitted("r1", 4, 12))
    bench.turn(submitted("r2", 4, 12))
    bench.turn(report(B, 1, chunks={0: 4}, tokens={0: 1}))
    bench.turn(submitted("w", 4, 12))
    bench.turn(report(B, bench.worker(B).seq, chunks={1: 4}, tokens={1: 1}))
    while not any(r.event is LogEvent.REQUEST_PREEMPTED for r in bench.records):
        bench.turn(report(B, bench.worker(B).seq, tokens={0: 1, 1: 1}))
    assert len(bench.core.fleet.waiting) == 2
    assert [answer.status for answer in refused(bench.turn(submitted("x", 4, 4)))] == [429]


# --- When to come back ---


def serve(bench: CoreBench, seconds: float) -> None:
    """The request that runs ends after so long, and the next one begins."""
    bench.now_us += round(seconds * 1e6)
    (seat,) = bench.worker(B).seats.values()
    chunks, ended = {0: seat.lengths.prompt}, {0: EndReason.END_TOKEN}
    bench.turn(report(B, bench.worker(B).seq, chunks=chunks, tokens={0: 1}, ended=ended))
    bench.turn(report(B, bench.worker(B).seq))


def test_when_to_come_back_is_when_the_queue_would_have_begun_at_the_speed_of_late() -> None:
    bench = busy(waiting_count_max=12)
    send(bench, *(f"a{index}" for index in range(12)), prompt=100)
    for index in range(8):  # A prompt of 100 tokens each half second.
        serve(bench, 0.5)
        send(bench, f"a{12 + index}", prompt=100)
    (answer,) = send(bench, "late")
    assert answer.retry_after_ms == pytest.approx(6000, rel=0.1)


def test_a_tenant_comes_back_by_its_share_of_the_speed() -> None:
    bench = busy(tenant_waiting_count_max=5, tenant_weights={"a": 3.0})
    names = [f"{tenant}{index}" for index in range(5) for tenant in "ab"]
    send(bench, *names, prompt=100)
    for index in range(8):
        serve(bench, 0.5)
        send(bench, f"a{5 + index}", f"b{5 + index}", prompt=100)
    waits = {answer.request_id[0]: answer.retry_after_ms for answer in send(bench, "a", "b")}
    assert waits["b"] == pytest.approx(3 * waits["a"], rel=0.01)
    assert waits["a"] == pytest.approx(500 / 200 / 0.75 * 1000, rel=0.1)


def test_a_tenant_that_waits_no_more_leaves_its_share_to_the_others() -> None:
    bench = busy()
    send(bench, "a1", "b1")
    assert bench.core.fleet.waiting.share("a") == 0.5
    bench.turn(cancelled("b1"))
    assert bench.core.fleet.waiting.share("a") == 1.0


def test_when_to_come_back_is_bounded_both_ways() -> None:
    bench = busy(waiting_count_max=1, retry_after_ms=700, retry_after_ms_max=9000)
    send(bench, "a1", prompt=900)
    serve(bench, 0.001)
    send(bench, "a2", prompt=1)
    (answer,) = send(bench, "a3")
    assert answer.retry_after_ms == 700
    bench.now_us += 100 * HALF_LIFE_US  # Nothing has begun for long.
    (answer,) = send(bench, "a4")
    assert answer.retry_after_ms == 9000


def test_before_anything_is_known_it_is_the_shortest() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (500,), FULL_ONLY), settings=CoreSettings(waiting_count_max=1)
    )
    first, second = submitted("r1", 4, 4), submitted("r2", 4, 4)
    (answer,) = refused(bench.turn(first, second))
    assert answer.retry_after_ms == CoreSettings().retry_after_ms
    (record,) = [r for r in bench.records if r.event is LogEvent.REQUEST_REFUSED]
    assert record.fields["retry_after_ms"] == answer.retry_after_ms


def test_a_rate_is_that_of_late() -> None:
    rate = Rate()
    assert rate.per_second(0) is None
    for index in range(600):
        rate.note(1000, index * 100_000)
    now_us = 60_000_000
    assert rate.per_second(now_us) == pytest.approx(10_000, rel=0.02)
    for index in range(600):
        rate.note(10, now_us + index * 100_000)
    assert rate.per_second(2 * now_us) == pytest.approx(100 + 9900 / 2**6, rel=0.05)
