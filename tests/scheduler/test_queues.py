"""The heaps against plain lists: the right order, and no dead entries without bound."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.ipc.protocol import RequestId
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.events import ClientId
from tidegate.scheduler.queues import STALE_COUNT_MIN, Timers, WaitingQueue
from tidegate.scheduler.state import Request


def request(number: int, priority: int = 0) -> Request:
    return Request(
        RequestId(f"r{number}"),
        ClientId("client"),
        Lengths(Tokens(1), Tokens(1)),
        (-priority, number),
        None,
        0,
        (),
    )


@given(st.lists(st.one_of(st.integers(-2, 2), st.sampled_from(["head", "any"])), max_size=60))
def test_the_head_is_the_smallest_rank_of_those_that_wait(steps: list[int | str]) -> None:
    queue, waiting = WaitingQueue(), list[Request]()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            waiting.append(request(number, step))
            queue.add(waiting[-1])
        elif waiting:
            leaves = queue.head() if step == "head" else waiting[number % len(waiting)]
            assert leaves is not None and leaves in queue
            queue.remove(leaves)
            waiting.remove(leaves)
            assert leaves not in queue
        assert queue.head() is min(waiting, key=lambda r: r.rank, default=None)
        assert list(queue) == waiting and len(queue) == len(waiting)


def test_a_queue_behind_a_head_that_waits_keeps_no_entries_of_those_that_left() -> None:
    queue = WaitingQueue()
    queue.add(request(0, priority=1))
    for number in range(1, 10_000):
        leaves = request(number)
        queue.add(leaves)
        queue.remove(leaves)
    assert len(queue._heap) <= STALE_COUNT_MIN + 3  # pyright: ignore[reportPrivateUsage] # It is what is bounded.


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=60))
def test_a_request_is_looked_at_by_the_earliest_time_that_was_asked_for(
    watches: list[tuple[int, int]],
) -> None:
    timers, requests, earliest = Timers(), dict[RequestId, Request](), dict[str, int]()
    for number, due_us in watches:
        living = requests.setdefault(RequestId(f"r{number}"), request(number))
        timers.watch(living, due_us)
        earliest[living.request_id] = min(due_us, earliest.get(living.request_id, due_us))
    for now_us in range(101):
        next_us = timers.next_us
        due = timers.take_due(requests, now_us)
        assert {r.request_id for r in due} == {n for n, at in earliest.items() if at == now_us}
        assert not due or (next_us is not None and next_us <= now_us)
    assert timers.next_us is None


def test_the_timers_of_those_that_are_gone_are_swept_out() -> None:
    timers, requests = Timers(), dict[RequestId, Request]()
    stays = requests[RequestId("r0")] = request(0)
    timers.watch(stays, 50)
    for number in range(1, 10_000):
        timers.watch(request(number), 1000)
        assert timers.take_due(requests, 0) == []
        assert len(timers) <= STALE_COUNT_MIN + 3
    assert timers.take_due(requests, 50) == [stays]
