"""Where trio tasks wait for a ZeroMQ socket: served in turn, cancellable, never forgotten.

The life of one operation (one send or one receive):

1. The task tries the call at once, without blocking. If it works, that is all.
2. If not, the operation is parked in its direction's queue, first in, first out.
3. One parked task, the leader, waits for the socket's file descriptor on behalf of all; the
   others sleep. trio lets only one task wait for a descriptor.
4. Whoever serves (the leader when the descriptor fires, or any task after a call of its own)
   makes the call for the parked tasks, stores each result and wakes its task.
5. A leader that leaves, served or cancelled, wakes the next parked task, which then leads.

What makes this correct:

- The descriptor is readable only while unread commands (a message arrived, a peer made room)
  lie in the socket's mailbox, and **every call on the socket may empty the mailbox**: also a
  send may swallow the wake-up that a parked reader waits for. So after every call, one that
  raised included, the parked tasks are served from a fresh reading of EVENTS.
- A failed non-blocking send need not have emptied the mailbox (the library looks at it about
  once a millisecond); reading EVENTS always does. So a failed send is final only after EVENTS
  has been read.
- A ROUTER always reports that it can be written to, whatever its peers' state. A blocked
  send is tried for each peer, and again every `ROUTER_RECHECK_S`: a receive may have swallowed
  the wake-up without leaving a trace in EVENTS.
- A result that is there is returned, even if the task was cancelled in the meantime: a message
  taken from the socket is never lost. The cancellation fires at the task's next checkpoint.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

import trio
import zmq
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    cancel_shielded_checkpoint,
    checkpoint_if_cancelled,
    current_task,
    notify_closing,
    reschedule,
    wait_readable,
    wait_task_rescheduled,
)

T = TypeVar("T")

ROUTER_RECHECK_S = 0.02  # Only while a ROUTER's send waits for a peer whose queue is full.

# Plain integers: arithmetic on the library's flag enums is slow.
EVENTS, POLLIN, POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)


class _Pending(Enum):
    """The value of an operation that has no value yet."""

    PENDING = 0


class Operation(Generic[T]):
    """One parked call. `peer` is the identity that a ROUTER sends to, else None."""

    __slots__ = ("call", "error", "peer", "scope", "task", "value")

    def __init__(self, call: Callable[[], T], peer: bytes | None) -> None:
        self.call = call
        self.peer = peer
        self.value: T | _Pending = _Pending.PENDING
        self.error: Exception | None = None
        self.task: Task | None = None  # Set while the task sleeps.
        self.scope: trio.CancelScope | None = None  # Set while the task leads.

    @property
    def done(self) -> bool:
        return self.value is not _Pending.PENDING or self.error is not None

    def wake(self) -> None:
        """Let the operation's task look at its state again."""
        if self.task is not None:
            task, self.task = self.task, None
            reschedule(task)
        elif self.scope is not None:
            self.scope.cancel()

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        assert self.value is not _Pending.PENDING
        return self.value


Queue = deque[Operation[Any]]


class Parking:
    """The queues of one socket, and the rules above. One trio thread uses it.

    `raw` may be called directly only for set-up, or if `serve_parked` follows.
    """

    def __init__(self, raw: "zmq.Socket[bytes]") -> None:
        self.raw = raw
        self.readers: Queue = deque()
        self.senders: Queue = deque()
        self._descriptor = raw.FD
        self._is_router = raw.get(zmq.TYPE) == zmq.ROUTER
        self._leader: Operation[Any] | None = None

    async def perform(
        self, queue: Queue, call: Callable[[], T], peer: bytes | None = None
    ) -> T:
        """Make the call as soon as it does not block, after those parked before it.

        `call` must raise `zmq.Again` where it would block, and change nothing then. A
        checkpoint in every case. Raises `trio.ClosedResourceError`, or the call's error.
        """
        await checkpoint_if_cancelled()
        self._check_open()
        if not queue:
            try:
                value = call()
            except zmq.Again:
                pass
            except zmq.ZMQError:
                self.serve_parked()
                raise
            else:
                self.serve_parked()
                await cancel_shielded_checkpoint()  # Fair to others; the call is made.
                return value
        return await self._park(queue, Operation(call, peer))

    def perform_now(self, queue: Queue, call: Callable[[], T], peer: bytes | None = None) -> T:
        """Make the call, or raise `trio.WouldBlock`; never overtakes a parked task.

        For a ROUTER, only tasks parked for the same peer count.
        """
        self._check_open()
        if any(operation.peer == peer for operation in queue):
            raise trio.WouldBlock
        try:
            try:
                return call()
            except zmq.Again:
                self.raw.get(EVENTS)
                return call()
        except zmq.Again:
            raise trio.WouldBlock from None
        finally:
            self.serve_parked()

    def serve_parked(self) -> None:
        """Serve parked tasks, if there are any. To be called after any call on `raw`."""
        if self.readers or self.senders:
            self._serve()

    def close(self) -> None:
        """Wake every parked task with `trio.ClosedResourceError`; the caller closes `raw`."""
        notify_closing(self._descriptor)
        for queue in (self.readers, self.senders):
            while queue:
                operation = queue.popleft()
                operation.error = trio.ClosedResourceError("the socket was closed")
                operation.wake()

    def _check_open(self) -> None:
        if self.raw.closed:
            raise trio.ClosedResourceError("the socket is closed")

    async def _park(self, queue: Queue, operation: Operation[T]) -> T:
        queue.append(operation)
        self._serve()
        if self._is_router and queue is self.senders:
            self._hurry_leader()
        try:
            while not operation.done:
                if self._leader is None:
                    await self._lead(operation)
                else:
                    await self._sleep(operation)
        except trio.ClosedResourceError:
            if not operation.done:
                operation.error = trio.ClosedResourceError("the socket was closed")
        except BaseException:  # trio.Cancelled
            if not operation.done:
                queue.remove(operation)
                raise
        finally:
            if self._leader is None:
                self._hand_over()
        return operation.result()

    async def _lead(self, operation: Operation[Any]) -> None:
        """Wait for the descriptor until it fires or `operation` is woken; then serve all."""
        self._leader = operation
        try:
            with trio.CancelScope() as operation.scope:
                if self._is_router and self.senders:
                    operation.scope.deadline = trio.current_time() + ROUTER_RECHECK_S
                await wait_readable(self._descriptor)
        finally:
            self._leader, operation.scope = None, None
        self._serve()

    async def _sleep(self, operation: Operation[Any]) -> None:
        def abort(_: RaiseCancelT) -> Abort:
            operation.task = None
            return Abort.SUCCEEDED

        operation.task = current_task()
        await wait_task_rescheduled(abort)

    def _hurry_leader(self) -> None:
        """A leader that began to wait before a ROUTER's sender parked has no deadline yet."""
        if self._leader is not None and self._leader.scope is not None:
            recheck = trio.current_time() + ROUTER_RECHECK_S
            self._leader.scope.deadline = min(self._leader.scope.deadline, recheck)

    def _hand_over(self) -> None:
        if self.readers:
            self.readers[0].wake()
        elif self.senders:
            self.senders[0].wake()

    def _serve(self) -> None:
        """Serve until one reading of EVENTS, with no call after it, shows nothing to do."""
        raw, readers, senders = self.raw, self.readers, self.senders
        while (readers or senders) and not raw.closed:
            events = raw.get(EVENTS)
            assert isinstance(events, int)
            again = False
            if senders and events & POLLOUT:
                again = self._attempt(senders)
                if self._is_router and not again and readers:
                    # The failed send may have swallowed a message's arrival.
                    events = raw.get(EVENTS)
                    assert isinstance(events, int)
            if readers and events & POLLIN:
                again = self._attempt(readers)
            if not again:
                return

    def _attempt(self, queue: Queue) -> bool:
        """Make the calls of parked tasks, in order. True if EVENTS must be read again."""
        called = False
        full: set[bytes] = set()  # Peers of a ROUTER that take nothing more now.
        for operation in list(queue):
            if operation.peer is not None and operation.peer in full:
                continue  # In order for each peer; no peer waits for another.
            try:
                operation.value = operation.call()
            except zmq.Again:
                if operation.peer is None:
                    return True  # EVENTS is exact here: the next reading ends the loop.
                full.add(operation.peer)
                continue
            except zmq.ZMQError as error:
                operation.error = error
            queue.remove(operation)
            operation.wake()
            called = True
        return called
