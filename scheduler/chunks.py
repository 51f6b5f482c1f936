"""Chunks: which positions of which prompts a worker runs in its next launches.

1. A *turn* is one launch's worth: several prompts share its budget, one chunk each, in order of
   rank. The worker runs turns one after another, and each of them whole.
2. Several turns are with the worker, so that it has the next one when one is over. A prompt
   gets a chunk before its last one is answered only if there are pages for all of it, which
   nobody else waits for: else it waits for those that come back with the answer.
3. Positions are settled, and pages given back, as chunks are answered.

While rows decode on the worker, each launch makes them wait for the chunks in it. Then the
budget is `mixed_chunk_tokens`, if that is less.
"""

from tidegate.ipc.protocol import Chunk, Grow, pack_ids
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.deadlines import restart
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Seat, Worker


def hand_out_chunks(fleet: Fleet, worker: Worker, now_us: int) -> None:
    """Give the worker its next turns, as far as prompts and pages go."""
    while worker.prefilling and len(worker.turns) < fleet.settings.chunks_in_flight:
        if not _hand_out_turn(fleet, worker, now_us):
            return


def _hand_out_turn(fleet: Fleet, worker: Worker, now_us: int) -> bool:
    """False if there is no chunk to give."""
    budget = _budget(worker, fleet.settings)
    turn, before = worker.turns.next, len(worker.turns)
    for seat in worker.prefilling:
        prompt, given = seat.lengths.prompt, seat.given
        left = prompt if budget is None else budget
        if left == 0:
            break
        if given == prompt:
            continue
        until = worker.books.chunk_end(given, Tokens(min(prompt, given + left)), prompt)
        if seat.chunks and not _has_room(seat, until):
            continue
        until = _cover(seat, until)
        assert until > given, "a prompt whose floor is reserved always goes on"
        chunk = Chunk(seat.row, until, sample=until == prompt, turn=turn)
        seat.chunks.append(chunk)
        worker.turns.open(turn)
        restart(fleet, seat.request, now_us)
        worker.add(chunk)
        if budget is not None:
            budget = Tokens(budget - (until - given))
    return len(worker.turns) > before


def _has_room(seat: Seat, until: Tokens) -> bool:
    """Are there pages for all of a chunk that is not the row's only one?"""
    worker = seat.worker
    return worker.books.can_cover(seat.holding, until, surplus=not worker.pages_are_wanted)


def _budget(worker: Worker, settings: CoreSettings) -> Tokens | None:
    """How many prompt positions a turn has at most; None for no bound."""
    alone, mixed = settings.chunk_tokens, settings.mixed_chunk_tokens
    if mixed is None or not _decodes(worker):
        return alone
    return mixed if alone is None else min(alone, mixed)


def _decodes(worker: Worker) -> bool:
    return any(
        seat.owes and seat.request.phase is Phase.DECODING for seat in worker.seats.values()
    )


def _cover(seat: Seat, until: Tokens) -> Tokens:
    """Take pages for the chunk; returns where it must be cut for want of pages."""
    worker, holding = seat.worker, seat.holding
    for index, _ in enumerate(worker.layout.groups):
        pages = worker.books.cover(holding, index, until, surplus=True)
        if pages:
            worker.add(Grow(seat.row, index, pack_ids(pages)))
    return min(until, holding.covered)
