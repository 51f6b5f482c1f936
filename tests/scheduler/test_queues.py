"""The queues against plain lists: the right order, and no dead entries without bound."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.ipc.protocol import RequestId
from tidegate.kvcache.demand import Lengths
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.events import ClientId
from tidegate.scheduler.fairness import STALE_COUNT_MIN, FairShares
from tidegate.scheduler.queues import Timers, WaitingQueue
from tidegate.scheduler.state import Request


def request(
    number: int, priority: int = 0, shares: FairShares | None = None, tenant: str = ""
) -> Request:
    return Request(
        RequestId(f"r{number}"),
        ClientId("client"),
        Lengths(Tokens(1 + number % 3), Tokens(1)),
        (shares or FairShares({})).open(priority, tenant),
        number,
        0,
        (),
    )


def order_of_arrival(request: Request) -> tuple[int, bool, int]:
    has_begun = request.account.has_begun
    number = request.rank[1] if has_begun else request.number
    return -request.priority, not has_begun, number


@given(st.lists(st.one_of(st.integers(-2, 2), st.sampled_from(["head", "any", "back"]))))
def test_priority_goes_first_then_who_has_begun_and_then_who_came_first(
    steps: list[int | str],
) -> None:
    queue, waiting, running = WaitingQueue({}), list[Request](), list[Request]()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            waiting.append(request(number, step, queue.shares))
            queue.add(waiting[-1])
        elif step == "back" and running:
            waiting.append(running.pop(number % len(running)))
            queue.add(waiting[-1])
        elif step == "head" and waiting:
            begins = queue.head()
            assert begins is not None
            if not begins.account.has_begun:
                begins.rank = (-begins.priority, number)
            queue.begin(begins, begins.lengths.prompt)
            waiting.remove(begins)
            running.append(begins)
        elif waiting:
            leaves = waiting.pop(number % len(waiting))
            assert leaves in queue
            queue.leave(leaves)
            assert leaves not in queue
        expected = sorted(waiting, key=order_of_arrival)
        assert queue.head() is next(iter(expected), None)
        assert list(queue.places()) == [r.request_id for r in expected]
        assert list(queue) == waiting and len(queue) == len(waiting)
        queue.check()


def test_a_queue_behind_a_head_that_waits_keeps_no_entries_of_those_that_left() -> None:
    queue = WaitingQueue({})
    head = request(0, 1, queue.shares)
    queue.add(head)
    for number in range(1, 10_000):
        leaves = request(number, 1, queue.shares)
        queue.add(leaves)
        leaves.rank = (-1, number)
        queue.begin(leaves, leaves.lengths.prompt)
        queue.add(leaves)  # It has given way.
        assert queue.head() is leaves
        queue.leave(leaves)
        queue.shares.end(leaves.account, 0, 0)
    assert len(queue._resumed) <= STALE_COUNT_MIN + 3  # pyright: ignore[reportPrivateUsage] # It is what is bounded.
    assert queue.head() is head


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
