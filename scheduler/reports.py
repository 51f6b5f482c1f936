"""What workers answer: positions settle, tokens come, rows end, pulls end, pages come back.

A report may name rows and tickets that are gone; those parts of it are counted and dropped.
Row numbers are not given out anew before the worker has passed the plan that withdrew them,
so a late answer can never be taken for one about the row's next user.
"""

import numpy as np

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    ChunkDone,
    EndReason,
    FetchResult,
    Row,
    RowEnd,
    Trimmed,
)
from tidegate.kvcache.demand import Leg, demand
from tidegate.kvcache.demand import Phase as DemandPhase
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler import early
from tidegate.scheduler.commands import EmitTokens, StartRow
from tidegate.scheduler.deadlines import end_late_prompt, restart
from tidegate.scheduler.events import Reported, RowFaulted
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.growth import cover_decode, page_runs
from tidegate.scheduler.limits import limit_row
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.pulls import start_last_pull
from tidegate.scheduler.state import Request, Seat, Worker
from tidegate.scheduler.surplus import give_back

DECODE = DemandPhase.DECODE


def apply_report(fleet: Fleet, report: Reported, now_us: int) -> None:
    worker = fleet.workers.get(report.worker)
    if worker is None:
        fleet.stale_count += 1
        return
    if not worker.completed <= report.completed <= worker.seq:
        text = (
            f"a report says that plan {report.completed} is completed, after "
            f"{worker.completed} and with {worker.seq} sent; it is dropped"
        )
        fleet.record(LogEvent.INTERNAL_ERROR, worker=worker.worker_id, text=text)
        return
    if report.chunks or report.rows or report.fetched or report.completed > worker.completed:
        worker.progress_us = now_us
        _note_answer(worker, report, now_us)
    worker.prefill_speed.note(_positions_run(worker, report.chunks), report.busy_us)
    for chunk in report.chunks:
        _chunk_done(fleet, worker, chunk, now_us)
    if report.rows:
        _tokens_sampled(fleet, worker, report, now_us)
    for end in report.ended:
        _row_ended(fleet, worker, end, now_us)
    for trimmed in report.trimmed:
        _pages_given_back(fleet, worker, trimmed, now_us)
    for result in report.fetched:
        _fetch_ended(fleet, worker, result, now_us)
    worker.complete(report.completed)
    if worker.is_suspect and worker.completed == worker.seq:
        worker.suspect_since_us = None
        fleet.record(LogEvent.WORKER_TRUSTED, worker=worker.worker_id)


def _note_answer(worker: Worker, report: Reported, now_us: int) -> None:
    """The worker has brought something: its time for an answer begins anew, at most once if it
    has not taken the next plan."""
    is_answer = report.completed > worker.completed
    if is_answer or not worker.was_launching:
        worker.answered_us = now_us
    worker.was_launching = not is_answer


def apply_fault(fleet: Fleet, fault: RowFaulted, now_us: int) -> None:
    worker = fleet.workers.get(fault.worker)
    seat = None if worker is None else worker.seats.get(fault.row)
    if seat is None or seat.request.request_id != fault.request_id:
        fleet.stale_count += 1
        return
    seat.end()
    fleet.record(LogEvent.ROW_FAULT, seat.request, kind=fault.kind, text=fault.text)
    fleet.finish(seat.request, EndReason.ERROR, now_us, f"{fault.kind}: {fault.text}", 500)


def settle(fleet: Fleet, seat: Seat, position: Tokens) -> None:
    """The worker has answered for positions below `position`: give back what is past."""
    assert position >= seat.settled, "a settled position went backwards"
    seat.settled = position
    if position >= seat.next_event:
        seat.worker.books.reclaim(seat.holding, position)
        seat.request.account.settle(seat.request.output_count)
        if seat.request.phase is Phase.DECODING:
            fleet.look_at(seat)


def _positions_run(worker: Worker, chunks: tuple[ChunkDone, ...]) -> int:
    """How many prompt positions a launch ran, of those whose requests are still there."""
    seats = [(worker.seats.get(chunk.row), chunk.until) for chunk in chunks]
    return sum(until - seat.settled for seat, until in seats if seat is not None)


def _chunk_done(fleet: Fleet, worker: Worker, chunk: ChunkDone, now_us: int) -> None:
    seat = worker.seats.get(chunk.row)
    if seat is None:
        fleet.stale_count += 1
        return
    request = seat.request
    if seat.chunk_until != chunk.until:
        _refuse_answer(
            fleet, seat, f"a chunk until {chunk.until} that it was not given", now_us
        )
        return
    worker.turns.close(seat.chunks.popleft().turn)
    fleet.record(
        LogEvent.CHUNK_DONE,
        request,
        worker=worker.worker_id,
        start=seat.settled,
        until=chunk.until,
    )
    worker.books.publish(seat.holding, Tokens(chunk.until))
    settle(fleet, seat, Tokens(chunk.until))
    if seat.settled == seat.lengths.prompt:
        worker.prefilling.remove(seat)
        if seat.leg is Leg.WHOLE:
            request.move(Phase.DECODING, now_us)
            fleet.look_at(seat)
    restart(fleet, request, now_us)
    end_late_prompt(fleet, request, now_us)


def _tokens_sampled(fleet: Fleet, worker: Worker, report: Reported, now_us: int) -> None:
    rows = np.frombuffer(report.rows, "<u4").astype(np.int64)
    counts = np.frombuffer(report.counts, "<u4").astype(np.int64)
    first_indexes, left = worker.rows.advance(rows, counts, now_us)
    left_out: list[int] = []
    for index in left:
        row, count = Row(rows.item(index)), counts.item(index)
        if not _tokens_of_row(fleet, worker, row, count, now_us):
            left_out.append(index)
    if len(left_out) < len(rows):
        indexes = first_indexes.astype("<u4").tobytes()
        fleet.commands.append(EmitTokens(report.report, indexes, tuple(left_out)))


def _tokens_of_row(
    fleet: Fleet, worker: Worker, row: Row, sampled_count: int, now_us: int
) -> bool:
    """The tokens of a row that needs a look. False if they are not to be delivered."""
    seat = worker.seats.get(row)
    if seat is None:
        fleet.stale_count += 1
        return False
    request = seat.request
    count = seat.output_count + sampled_count
    # A token is sampled once the one before it is fed: after the first, all of the prompt is.
    settled = Tokens(request.lengths.prompt + count - 1)
    first_count = seat.lengths.prompt - request.lengths.prompt + 1
    count_max = first_count if seat.leg is Leg.SOURCE else request.lengths.output
    is_decoding = seat.is_started and not seat.is_ended
    if (
        not is_decoding
        or not seat.output_count < count <= count_max
        or not seat.lengths.prompt <= seat.settled <= settled <= seat.holding.covered
    ):
        text = f"{sampled_count} tokens that it cannot have sampled"
        _refuse_answer(fleet, seat, text, now_us)
        return False
    if request.times.first_token_us is None:
        request.times.first_token_us = now_us
    seat.bring(count, now_us)
    settle(fleet, seat, settled)
    return True


def _row_ended(fleet: Fleet, worker: Worker, end: RowEnd, now_us: int) -> None:
    seat = worker.seats.get(end.row)
    if seat is None:
        fleet.stale_count += 1
        return
    request = seat.request
    is_decoding = seat.is_started and not seat.is_ended and request.output_count > 0
    match end.reason:
        case EndReason.END_TOKEN | EndReason.STOP_ID if is_decoding:
            is_over = True
        case EndReason.LENGTH if is_decoding:
            is_over = request.output_count == request.lengths.output
        case _:
            _refuse_answer(fleet, seat, f"the end of its row ({end.reason.value})", now_us)
            return
    if is_over:
        seat.end()
        fleet.finish(request, end.reason, now_us)
    elif seat.leg is Leg.SOURCE:
        seat.end()
        _await_target(fleet, seat, now_us)
    else:
        _refuse_answer(fleet, seat, "the end of its row before its last token", now_us)


def _pages_given_back(fleet: Fleet, worker: Worker, trimmed: Trimmed, now_us: int) -> None:
    seat = worker.seats.get(trimmed.row)
    if seat is None:
        fleet.stale_count += 1
    elif give_back(seat, trimmed):
        fleet.look_at(seat)
    else:
        text = f"that it gave back {list(trimmed.page_counts)} pages, which cannot be"
        _refuse_answer(fleet, seat, text, now_us)


def _refuse_answer(fleet: Fleet, seat: Seat, what: str, now_us: int) -> None:
    """The worker's answer contradicts what it was told: the request cannot go on."""
    text = f"worker {seat.worker.worker_id} reported {what}"
    fleet.record(LogEvent.INTERNAL_ERROR, seat.request, text=text)
    fleet.finish(seat.request, EndReason.ERROR, now_us, text, status=500)


def _await_target(fleet: Fleet, seat: Seat, now_us: int) -> None:
    request = seat.request
    seat.worker.books.close(seat.holding)
    request.move(Phase.HANDING_OFF, now_us)
    fleet.record(LogEvent.PREFILL_DONE, request, worker=seat.worker.worker_id)
    fleet.await_target(request)
    restart(fleet, request, now_us)


def _fetch_ended(fleet: Fleet, worker: Worker, result: FetchResult, now_us: int) -> None:
    request = worker.tickets.get(result.ticket)
    if request is None:
        fleet.stale_count += 1
        return
    seat = request.target if request.early is None else request.early
    assert seat is not None
    is_early = seat.pulled.asked_until < seat.lengths.prompt
    if result.error and is_early:
        early.pull_failed(fleet, request, now_us)
        return
    if result.error:
        text = f"the hand-off to worker {worker.worker_id} failed: {result.error}"
        fleet.finish(request, EndReason.ERROR, now_us, text, status=500)
        return
    del worker.tickets[result.ticket]
    request.ticket = None
    request.bytes_moved += result.byte_count
    seat.pulled.note(result.byte_count, result.busy_us, is_early=is_early)
    if not is_early:
        _handoff_done(fleet, request, seat, now_us)
    elif request.target is seat:
        start_last_pull(fleet, request, seat)
        restart(fleet, request, now_us)


def _handoff_done(fleet: Fleet, request: Request, target: Seat, now_us: int) -> None:
    saved = bytes_saved(request)
    request.bytes_saved += saved
    fleet.record(
        LogEvent.HANDOFF_DONE,
        request,
        worker=target.worker.worker_id,
        bytes_moved=target.pulled.byte_count,
        bytes_saved=saved,
        busy_us=target.pulled.busy_us,
        bytes_early=target.pulled.early_byte_count,
    )
    _start_decode(fleet, request, now_us)


def _start_decode(fleet: Fleet, request: Request, now_us: int) -> None:
    source, seat = request.source, request.target
    assert source is not None and seat is not None
    fleet.leave(source)
    request.move(Phase.DECODING, now_us)
    worker, lengths, pace = seat.worker, seat.lengths, fleet.settings.pace
    seat.holding.keeps_windows = False
    worker.books.lower(
        seat.holding,
        [
            min(reserve, demand(group, DECODE, lengths, pace, whole_prompt=False).floor)
            for group, reserve in zip(worker.layout.groups, seat.holding.reserve, strict=True)
        ],
    )
    settle(fleet, seat, lengths.prompt)
    cover_decode(fleet, seat)
    seat.is_started = True
    worker.add(
        StartRow(
            seat.row,
            request.request_id,
            position=seat.settled,
            output_index=request.output_count,
            limit=lengths.end,
            pages=page_runs(seat),
        )
    )
    limit_row(fleet, seat)
    restart(fleet, request, now_us)
    fleet.record(LogEvent.DECODE_STARTED, request, worker=worker.worker_id)


def bytes_saved(request: Request) -> int:
    """Bytes of the prompt's window pages that need not be moved, since decode never reads them.

    Tails do not count: no one would move more of them than their last rows.
    """
    seat = request.target
    assert seat is not None
    return sum(
        (group.pages(seat.lengths.prompt) - table.page_count) * group.page_bytes
        for group, table in zip(seat.worker.layout.groups, seat.holding.tables, strict=True)
        if group.is_window
    )
