"""Deadlines: in every phase a request waits for something, and not for ever.

Two bound its waiting, and not the work. They are counted from its last named event: accepted,
admitted, chunk sent, chunk done, prefilled, pull sent, decoding, tokens.

- For an answer that a worker owes it waits for the stall timeout, and as long for its client,
  if that does not keep up with reading;
- for a turn or for room, for the queue timeout.

Two are the client's own, and are counted from the request's receipt:

- until its first token; in the queue that takes the place of the queue timeout;
- in all, in every phase.

Work that can no longer make one of the client's is not begun. A prompt that would bring its
next token too late even at twice its worker's best speed of late ends instead of being
admitted, or instead of its next chunk.
"""

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from tidegate.ipc.protocol import EndReason, WorkerId
from tidegate.scheduler.door import Choice, admission_choices
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Request, Worker


class Kind(Enum):
    """What a deadline is for."""

    FIRST_TOKEN = auto()  # The client's, until the first token.
    TOTAL = auto()  # The client's, in all.
    ANSWER = auto()  # Of a worker.
    READER = auto()  # Of the client, to read what was sent.
    TURN = auto()  # In a queue.


class Deadline(msgspec.Struct, frozen=True):
    """`too_long_us` is what the rest of its prompt takes at least, if it ends for that."""

    us: int
    kind: Kind
    too_long_us: int = 0


def deadline(request: Request, settings: CoreSettings) -> Deadline:
    """When the request has waited too long, or cannot make its client's deadline."""
    if request.is_held and request.phase is Phase.DECODING:
        due = Deadline(request.since_us + settings.stall_timeout_us, Kind.READER)
    elif _worker_owing(request) is None:
        due = Deadline(request.since_us + settings.queue_timeout_us, Kind.TURN)
    else:
        due = Deadline(request.since_us + settings.stall_timeout_us, Kind.ANSWER)
    own = _own(request)
    if own is None:
        return due
    own = _last_chance(request, own)
    is_patient = request.phase is Phase.WAITING and request.first_token_due_us is not None
    return own if own.us <= due.us or is_patient else due


def restart(fleet: Fleet, request: Request, now_us: int) -> None:
    """A named event has happened: the deadline is counted from now."""
    request.since_us = now_us
    fleet.timers.watch(request, deadline(request, fleet.settings).us)


def expire(fleet: Fleet, now_us: int) -> None:
    """End the requests that have waited too long."""
    for request in fleet.timers.take_due(fleet.requests, now_us):
        due = deadline(request, fleet.settings)
        if due.us <= now_us:
            text = _reason(request, due, fleet.settings, now_us)
            fleet.finish(request, EndReason.TIMEOUT, now_us, text, status=503)
        else:
            fleet.timers.watch(request, due.us)


def in_time(
    fleet: Fleet, request: Request, choices: Sequence[Choice], now_us: int
) -> Sequence[Choice]:
    """The choices, with those workers only on which the request can make its deadlines."""
    own = _own(request)
    if own is None:
        return choices
    limited: list[Choice] = []
    for choice in choices:
        workers = tuple(
            worker
            for worker in choice.workers
            if now_us + _needed_us(fleet, request, choice, worker) < own.us
        )
        if workers:
            limited.append(Choice(choice.leg, choice.lengths, workers))
    return limited


def end_late_head(fleet: Fleet, request: Request, now_us: int) -> bool:
    """End the first of the queue if it would be too late on every worker; says whether."""
    own = _own(request)
    if own is None:
        return False
    needed_us = [
        _needed_us(fleet, request, choice, worker)
        for choice in admission_choices(fleet.healthy(), request)
        for worker in choice.workers
    ]
    if not needed_us or now_us + min(needed_us) < own.us:
        return False
    _end_late(fleet, request, own, min(needed_us), now_us)
    return True


def end_late_prompt(fleet: Fleet, request: Request, now_us: int) -> None:
    """End a prompt of which a chunk is done, if the rest of it cannot be in time."""
    own, seat = _own(request), request.source
    if own is None or seat is None or request.phase is not Phase.PREFILLING:
        return
    needed_us = seat.worker.prefill_speed.least_us(seat.lengths.prompt - seat.settled)
    if now_us + needed_us >= own.us:
        _end_late(fleet, request, own, needed_us, now_us)


def _needed_us(fleet: Fleet, request: Request, choice: Choice, worker: Worker) -> int:
    """What the prompt takes at least on a worker that has nothing else to do."""
    hit = fleet.find_hit(request, worker, choice.leg)
    tokens = choice.lengths.prompt - (0 if hit is None else hit.tokens)
    return worker.prefill_speed.least_us(tokens)


def _end_late(
    fleet: Fleet, request: Request, own: Deadline, needed_us: int, now_us: int
) -> None:
    text = _own_reason(request, Deadline(own.us, own.kind, needed_us), now_us)
    fleet.finish(request, EndReason.TIMEOUT, now_us, text, status=503)


def _own(request: Request) -> Deadline | None:
    """The nearest of the client's deadlines."""
    dues: list[Deadline] = []
    if request.first_token_due_us is not None:
        dues.append(Deadline(request.first_token_due_us, Kind.FIRST_TOKEN))
    if request.total_due_us is not None:
        dues.append(Deadline(request.total_due_us, Kind.TOTAL))
    return min(dues, key=lambda due: due.us, default=None)


def _last_chance(request: Request, own: Deadline) -> Deadline:
    """When a prompt that waits for its turn must go on, to make the client's deadline."""
    seat = request.source
    if request.phase is not Phase.PREFILLING or seat is None or seat.chunk_until is not None:
        return own
    needed_us = seat.worker.prefill_speed.least_us(seat.lengths.prompt - seat.settled)
    return Deadline(own.us - needed_us, own.kind, needed_us)


def _worker_owing(request: Request) -> WorkerId | None:
    """The worker that has yet to answer for this request; None if it waits for its turn."""
    seat = request.source if request.target is None else request.target
    if seat is None or seat.is_ended:
        return None
    is_asked = seat.chunk_until is not None or seat.settled >= seat.lengths.prompt
    is_pulling = request.ticket is not None
    return seat.worker.worker_id if is_asked or is_pulling else None


def _reason(request: Request, due: Deadline, settings: CoreSettings, now_us: int) -> str:
    match due.kind:
        case Kind.FIRST_TOKEN | Kind.TOTAL:
            return _own_reason(request, due, now_us)
        case Kind.ANSWER:
            worker, seconds = _worker_owing(request), settings.stall_timeout_us / 1e6
            return (
                f"worker {worker} brought nothing of it for {seconds:g} s, which is the limit"
            )
        case Kind.READER:
            seconds = settings.stall_timeout_us / 1e6
            return f"its client did not catch up with reading for {seconds:g} s, the limit"
        case Kind.TURN:
            seconds = settings.queue_timeout_us / 1e6
            waited = {
                Phase.WAITING: "in the queue",
                Phase.PREFILLING: "for its prompt's next turn",
                Phase.HANDING_OFF: "for room on a decode worker",
            }[request.phase]
            return f"it waited {seconds:g} s {waited}, which is the limit"


def _own_reason(request: Request, due: Deadline, now_us: int) -> str:
    received_us, count = request.times.received_us, request.output_count
    tokens = f"{count:,} token" if count == 1 else f"{count:,} tokens"
    if due.kind is Kind.FIRST_TOKEN:
        due_us, in_all, until = request.first_token_due_us, "", "before its first token"
    else:
        due_us, in_all, until = request.total_due_us, " in all", f"after {tokens}"
    assert due_us is not None
    whose = f"its own timeout of {(due_us - received_us) / 1e6:g} s{in_all}"
    if due_us <= now_us:
        return f"{whose} passed {until}"
    return (
        f"{whose} would have passed {until}: the rest of its prompt takes more than "
        f"{due.too_long_us / 1e6:.3g} s"
    )
