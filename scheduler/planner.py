"""One plan: deadlines, growth, destinations, admission, chunks, and then the messages.

The order is that of holding: rows that decode first, then prompts that are finished, then
prompts that run, then those that wait. All of it is derived from the state at hand; nothing is
remembered from one plan to the next but the queues themselves.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
    Grow,
    Poison,
    PullGroup,
    Role,
    pack_ids,
)
from tidegate.kvcache.books import run_starts
from tidegate.kvcache.demand import Leg, Lengths
from tidegate.kvcache.layout import All, Tokens
from tidegate.scheduler.commands import SendPlan, StartRow
from tidegate.scheduler.deadlines import expire, restart
from tidegate.scheduler.door import of_role, shortage, whole_workers
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.losses import suspect_stalled
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.reports import cover_decode, page_runs
from tidegate.scheduler.state import Request, Seat, Worker


def make_plan(fleet: Fleet, now_us: int) -> None:
    suspect_stalled(fleet, now_us)
    expire(fleet, now_us)
    grow_decoding(fleet)
    assign_targets(fleet, now_us)
    admit_waiting(fleet, now_us)
    for worker in fleet.workers.values():
        if not worker.is_suspect:
            hand_out_chunks(fleet, worker, now_us)
    fail_stuck_heads(fleet, now_us)
    send_plans(fleet, now_us)


def grow_decoding(fleet: Fleet) -> None:
    due, fleet.due = fleet.due, []
    for seat in due:
        worker = seat.worker
        if worker.seats.get(seat.row) is not seat or seat.settled < seat.next_event:
            continue
        for group, ids in cover_decode(fleet, seat):
            worker.add(Grow(seat.row, group, ids))


def assign_targets(fleet: Fleet, now_us: int) -> None:
    """Give finished prompts a destination by rank; the first that must wait ends it."""
    while fleet.awaiting_target:
        request = fleet.awaiting_target[0]
        lengths = request.lengths
        targets = [
            worker
            for worker in of_role(fleet.healthy(), Role.DECODE)
            if shortage(worker, Leg.TARGET, lengths) is None
        ]
        seat = _sit_on_roomiest(fleet, request, targets, Leg.TARGET, lengths.prompt)
        if seat is None:
            _note_wait(fleet, request, targets, Leg.TARGET)
            return
        fleet.awaiting_target.pop(0)
        request.target = seat
        request.workers["decode"] = seat.worker.worker_id
        request.times.fetch_us = now_us
        _start_pull(fleet, request, seat)
        restart(fleet, request, now_us)


def admit_waiting(fleet: Fleet, now_us: int) -> None:
    """Admit from the head of the queue while it fits; the first that must wait ends it."""
    while (request := fleet.waiting.head()) is not None:
        seat = _admit(fleet, request)
        if seat is None:
            return
        fleet.waiting.remove(request)
        request.source = seat
        request.move(Phase.PREFILLING)
        request.times.admitted_us = now_us
        request.workers["prefill"] = seat.worker.worker_id
        seat.worker.prefilling.append(seat)
        seat.worker.prefilling.sort(key=lambda s: s.request.rank)
        restart(fleet, request, now_us)
        fleet.record(
            LogEvent.REQUEST_ADMITTED,
            request,
            worker=seat.worker.worker_id,
            leg=seat.leg.value,
            queue_us=now_us - request.times.received_us,
        )


def hand_out_chunks(fleet: Fleet, worker: Worker, now_us: int) -> None:
    """Give the worker its next launch of prompt positions: several prompts share the budget."""
    if worker.chunks_in_flight:
        return
    budget = fleet.settings.chunk_tokens
    for seat in worker.prefilling:
        prompt = seat.request.lengths.prompt
        left = prompt if budget is None else budget
        if left == 0:
            return
        until = _cover_chunk(seat, Tokens(min(prompt, seat.settled + left)))
        assert until > seat.settled, "a prompt whose floor is reserved always goes on"
        seat.chunk_until = until
        worker.chunks_in_flight += 1
        restart(fleet, seat.request, now_us)
        worker.add(Chunk(seat.row, until, sample=until == prompt))
        if budget is not None:
            budget = Tokens(budget - (until - seat.settled))


def fail_stuck_heads(fleet: Fleet, now_us: int) -> None:
    """A head that waits although nothing is under way that could help it is a bug of ours.

    It is ended with an error and a record of the pools, rather than left to wait for ever.
    """
    healthy = fleet.healthy()
    while not any(worker.is_working for worker in healthy):
        head = fleet.awaiting_target[0] if fleet.awaiting_target else fleet.waiting.head()
        if head is None:
            return
        pools = "; ".join(
            f"{worker.worker_id}: {[int(pool.free_count) for pool in worker.books.pools]} free "
            f"of {[int(count) for count in worker.books.page_counts]}"
            for worker in healthy
        )
        fleet.record(LogEvent.INTERNAL_ERROR, head, text="stuck on an idle fleet", pools=pools)
        text = "the request could not be placed although the fleet is idle"
        fleet.finish(head, EndReason.ERROR, now_us, text, status=500)


def send_plans(fleet: Fleet, now_us: int) -> None:
    for worker in fleet.workers.values():
        poison = (
            tuple(
                Poison(group, pack_ids(ids))
                for group, ids in enumerate(worker.books.take_freed())
                if ids
            )
            if fleet.settings.poison_freed_pages
            else ()
        )
        if not worker.must_plan and not poison:
            continue
        if worker.completed == worker.seq:
            # It had answered everything: its time begins with this plan.
            worker.progress_us = worker.answered_us = now_us
        worker.seq = worker.next_seq
        operations = (*poison, *worker.operations)
        worker.operations = []
        worker.must_plan = False
        fleet.commands.append(SendPlan(worker.worker_id, worker.seq, operations))


def _admit(fleet: Fleet, request: Request) -> Seat | None:
    lengths = request.lengths
    healthy = fleet.healthy()
    wholes = [
        worker
        for worker in whole_workers(healthy, lengths)
        if shortage(worker, Leg.WHOLE, lengths) is None
    ]
    seat = _sit_on_roomiest(fleet, request, wholes, Leg.WHOLE, Tokens(0))
    sources: list[Worker] = []
    if seat is None and lengths.output > 1 and _may_hand_off(fleet, healthy, lengths):
        sources = [
            worker
            for worker in of_role(healthy, Role.PREFILL)
            if shortage(worker, Leg.SOURCE, lengths) is None
        ]
        seat = _sit_on_roomiest(fleet, request, sources, Leg.SOURCE, Tokens(0))
    if seat is None:
        _note_wait(fleet, request, wholes or sources, Leg.WHOLE if wholes else Leg.SOURCE)
        return None
    _start_prefill(seat)
    return seat


def _may_hand_off(fleet: Fleet, healthy: list[Worker], lengths: Lengths) -> bool:
    if len(fleet.awaiting_target) >= fleet.settings.handoff_waiting_count_max:
        return False
    targets = of_role(healthy, Role.DECODE)
    return any(shortage(worker, Leg.TARGET, lengths) is None for worker in targets)


def _sit_on_roomiest(
    fleet: Fleet, request: Request, workers: list[Worker], leg: Leg, first_query: Tokens
) -> Seat | None:
    """A seat on the worker with the most available pages in its first group that has room."""
    by_room = sorted(workers, key=lambda w: (-w.books.available(0), w.worker_id))
    for worker in by_room:
        seat = fleet.sit(request, worker, leg, first_query)
        if seat is not None:
            return seat
    return None


def _start_prefill(seat: Seat) -> None:
    """Begin the row; a full group's pages are all taken at once, the others with each chunk."""
    books, lengths = seat.worker.books, seat.request.lengths
    end = lengths.prompt if seat.leg is Leg.SOURCE else lengths.end
    for index, group in enumerate(books.layout.groups):
        if isinstance(group.reach, All):
            books.cover(seat.holding, index, end, surplus=False)
    seat.is_started = True
    seat.worker.add(
        StartRow(
            seat.row,
            seat.request.request_id,
            position=0,
            output_index=0,
            limit=end,
            pages=page_runs(seat),
        )
    )


def _cover_chunk(seat: Seat, until: Tokens) -> Tokens:
    """Take pages for the chunk; returns where it must be cut for want of pages."""
    worker, holding = seat.worker, seat.holding
    for index, _ in enumerate(worker.layout.groups):
        pages = worker.books.cover(holding, index, until, surplus=True)
        if pages:
            worker.add(Grow(seat.row, index, pack_ids(pages)))
    return min(until, holding.covered)


def _start_pull(fleet: Fleet, request: Request, target: Seat) -> None:
    """Have the target copy what later steps read: [first_needed(L), L) of each group.

    With the flag `swa_only_transfer` false all of the prompt moves, as its pages are all held.
    """
    source = request.source
    assert source is not None
    prompt = request.lengths.prompt
    groups: list[PullGroup] = []
    layout = target.worker.layout
    starts = run_starts(layout.groups, prompt, keeps_windows=target.holding.keeps_windows)
    for index, (group, start) in enumerate(zip(layout.groups, starts, strict=True)):
        target.worker.books.cover(target.holding, index, prompt, surplus=False)
        position, source_ids = source.holding.tables[index].run(start, prompt)
        target_position, target_ids = target.holding.tables[index].run(start, prompt)
        assert position == target_position and len(source_ids) == len(target_ids)
        groups.append(PullGroup(position, pack_ids(source_ids), pack_ids(target_ids)))
        request.bytes_saved += (group.pages(prompt) - len(source_ids)) * group.page_bytes
    ticket = fleet.new_ticket()
    request.ticket = ticket
    target.worker.tickets[ticket] = request
    target.worker.add(
        Fetch(
            ticket,
            request.request_id,
            source.worker.pool,
            source.worker.incarnation,
            tuple(groups),
            prompt,
        )
    )
    fleet.record(
        LogEvent.HANDOFF_STARTED,
        request,
        source=source.worker.worker_id,
        target=target.worker.worker_id,
        length=prompt,
    )


def _note_wait(fleet: Fleet, request: Request, workers: list[Worker], leg: Leg) -> None:
    """Record what the request waits for, when that has changed.

    The same kind of thing on another worker is no change: which one is the roomiest may be
    another in each plan.
    """
    if not workers:
        kind, worker_id, pages = "a decode worker for the prompts that are finished", None, 0
    else:
        worker = max(workers, key=lambda w: w.books.available(0))
        kind, pages = _lack(fleet, request, worker, leg)
        worker_id = worker.worker_id
    if kind != request.waits_for:
        request.waits_for = kind
        fleet.record(
            LogEvent.REQUEST_WAITS, request, reason=kind, worker=worker_id, pages_short=pages
        )


def _lack(fleet: Fleet, request: Request, worker: Worker, leg: Leg) -> tuple[str, int]:
    if not worker.rows_free:
        return "a row", 0
    short = fleet.shortage_now(worker, leg, request.lengths)
    assert short is not None, "a request waits for a worker that has room for it"
    group, pages = short
    return f"pages of the {worker.layout.groups[group].name} pool", pages
