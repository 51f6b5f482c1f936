"""The two heaps of requests: those that wait for admission, and when each must be looked at.

Requests that have left are not searched for in a heap: their entries are skipped, and swept
out when they outnumber the living.
"""

import heapq
from collections.abc import Iterator

from tidegate.ipc.protocol import RequestId
from tidegate.scheduler.state import Rank, Request

STALE_COUNT_MIN = 64  # So many dead entries are never worth a sweep.


class WaitingQueue:
    """Requests in the order in which they are to be admitted."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, RequestId]] = []
        self._waiting: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of their arrival."""
        return iter(tuple(self._waiting.values()))

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._waiting

    def add(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (request.rank, request.request_id))

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + STALE_COUNT_MIN:
            self._heap = [(r.rank, r.request_id) for r in self._waiting.values()]
            heapq.heapify(self._heap)

    def head(self) -> Request | None:
        """The request that is admitted next."""
        while self._heap:
            request = self._waiting.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None


class Timers:
    """One timer for each request: it is looked at by then at the latest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_us(self) -> int | None:
        """No request need be looked at before this time."""
        return self._heap[0][0] if self._heap else None

    def watch(self, request: Request, due_us: int) -> None:
        """Look at the request at `due_us`, or earlier if that was asked for before."""
        if request.timer_us is None or due_us < request.timer_us:
            request.timer_us = due_us
            heapq.heappush(self._heap, (due_us, request.request_id))

    def take_due(self, requests: dict[RequestId, Request], now_us: int) -> list[Request]:
        """The living requests whose time has come. Each must be watched anew, or end."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now_us:
            time_us, request_id = heapq.heappop(self._heap)
            request = requests.get(request_id)
            if request is not None and request.timer_us == time_us:
                request.timer_us = None
                due.append(request)
        if len(self._heap) > 2 * len(requests) + STALE_COUNT_MIN:
            self._heap = [
                (request.timer_us, request.request_id)
                for request in requests.values()
                if request.timer_us is not None
            ]
            heapq.heapify(self._heap)
        return due
