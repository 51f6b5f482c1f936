"""What a request waits for, as a sentence for people."""

from typing import assert_never

from tidegate.ipc.protocol import Phase, Waiting, WaitKind
from tidegate.scheduler.state import Request, Worker


def wait_text(waiting: Waiting, request: Request, worker: Worker | None, first: str) -> str:
    """The sentence for `waiting.text`, which begins with the request's name in logs.

    `worker` is the one that `waiting` names. `first` is the sentence of the request that is
    served first of those before it, or empty.
    """
    name = request.request_id
    place = _place(waiting)
    match waiting.kind:
        case WaitKind.TURN:
            text = f"{name} {_turn(waiting)}"
        case WaitKind.DESTINATION:
            text = (
                f"{name} waits in the queue, since {_count(waiting.ahead, 'finished prompt')} "
                "without a decode worker are as many as there may be"
            )
        case WaitKind.ROW:
            assert worker is not None
            text = f"{name} waits for a row of {place}: all {worker.row_count} are taken"
            if worker.rows_draining:
                text += f", {len(worker.rows_draining)} of them until the worker has answered"
        case WaitKind.PAGES:
            text = (
                f"{name} waits for {_more_pages(waiting)} of {place}: it {_goes_on(waiting)} "
                f"when {_are(waiting.pages_needed)} available, and "
                f"{_are(waiting.pages_available)}{_holders(waiting)}"
            )
            if waiting.pages_draining:
                text += f"; {_are(waiting.pages_draining)} draining"
        case WaitKind.DRAINING:
            text = (
                f"{name} waits for {_more_pages(waiting)} of {place}: "
                f"{_are(waiting.pages_draining)} draining, and free when it has answered"
            )
        case WaitKind.ANSWER:
            text = f"{name} {_answer(request, place)}"
        case WaitKind.READER:
            text = (
                f"{name} waits for its client to read what was sent: its row on {place} "
                "sits out until then"
            )
        case WaitKind.NOTHING:
            raise AssertionError("a living request waits for something")
        case _:
            assert_never(waiting.kind)
    if waiting.passed:
        have = "has" if waiting.passed == 1 else "have"
        text += f"; {_count(waiting.passed, 'other')} behind it {have} begun before it"
    return f"{text}; {first}" if first else text


def _place(waiting: Waiting) -> str:
    role = "" if waiting.role is None else f"{waiting.role.value} "
    return f"{role}worker {waiting.worker}"


def _turn(waiting: Waiting) -> str:
    if not waiting.ahead:
        return "is next"
    what = {
        Phase.WAITING: "waits in the queue",
        Phase.PREFILLING: f"waits for its prompt's turn on {_place(waiting)}",
        Phase.HANDING_OFF: "has finished its prompt and waits for a decode worker",
    }
    assert waiting.phase is not None
    return f"{what[waiting.phase]}, behind {_count(waiting.ahead, 'other')}"


def _answer(request: Request, place: str) -> str:
    match request.phase:
        case Phase.HANDING_OFF:
            return f"is handed over: {place} copies its pages"
        case Phase.DECODING:
            return f"waits for {place} to bring its next tokens"
        case _:
            seat = request.source
            assert seat is not None
            until = seat.lengths.prompt if seat.chunk_until is None else seat.chunk_until
            prompt = f"its {seat.lengths.prompt:,} prompt tokens"
            return f"waits for {place} to run {until:,} of {prompt}"


def _more_pages(waiting: Waiting) -> str:
    return f"{_count(waiting.pages_short, 'more page')} of the {waiting.pool} pool"


def _goes_on(waiting: Waiting) -> str:
    assert waiting.phase is not None
    return {
        Phase.WAITING: "begins",
        Phase.HANDING_OFF: "is handed over",
        Phase.DECODING: "goes on",
    }[waiting.phase]


def _holders(waiting: Waiting) -> str:
    text = "".join(
        f"{',' if index else ';'} {holder.request_id} has {holder.page_count:,}"
        for index, holder in enumerate(waiting.holders)
    )
    if waiting.holders_left_out:
        text += f", and {_count(waiting.holders_left_out, 'other')} fewer"
    return text


def _are(count: int) -> str:
    return f"{count:,} is" if count == 1 else f"{count:,} are"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
