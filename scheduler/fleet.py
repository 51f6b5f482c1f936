"""The core's whole state, and the moves of a request that several modules make.

Commands are gathered here, in the order of the decisions, until `Core.plan` returns them.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, RequestId, Stop, Ticket, Usage, WorkerId
from tidegate.kvcache.demand import Leg, Lengths, first_reserves, keeps_windows
from tidegate.kvcache.layout import All, Pages, Tokens
from tidegate.kvcache.page_table import run_starts
from tidegate.kvcache.prefix_row import Hit
from tidegate.scheduler.commands import Command, FieldValue, FinishRequest, Record
from tidegate.scheduler.events import ClientId
from tidegate.scheduler.invariants import check_request, check_seat
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.queues import Timers, WaitingQueue
from tidegate.scheduler.rates import Rate
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Request, Seat, Worker


class Fleet:
    """Requests and workers, with the queues between them."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.workers: dict[WorkerId, Worker] = {}
        self.requests: dict[RequestId, Request] = {}
        self.by_client: dict[ClientId, dict[RequestId, Request]] = {}
        self.behind: dict[ClientId, None] = {}  # Clients that do not keep up with reading.
        self.waiting = WaitingQueue(settings.tenant_weights)
        self.awaiting_target: list[Request] = []  # Prefilled, without a destination, by rank.
        self.newcomers: list[Request] = []  # Of the two queues, since the last plan.
        self._due: list[Seat] = []  # Decoding seats whose pages need a look.
        self.timers = Timers()
        self.begun_tokens = Rate()  # Tokens of the prompts that have left the queue to run.
        self.commands: list[Command] = []
        self.next_number = 0  # Of a request that arrives.
        self.next_rank = 0  # Of a request that begins.
        self.next_ticket = 0
        self.planned_us = 0  # When the last plan was made.
        self.stale_count = 0  # Late answers about rows or tickets that are gone.

    def record(
        self, event: LogEvent, request: Request | RequestId | None = None, **fields: FieldValue
    ) -> None:
        name = request.request_id if isinstance(request, Request) else request
        self.commands.append(Record(event, name, fields))

    @property
    def waiting_count(self) -> int:
        return len(self.waiting)

    def look_at(self, seat: Seat) -> None:
        """The pages of a decoding row need a look in the next plan."""
        if not seat.is_due:
            seat.is_due = True
            self._due.append(seat)

    def take_due(self) -> list[Seat]:
        due, self._due = self._due, []
        for seat in due:
            seat.is_due = False
        return due

    def healthy(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.is_suspect]

    def new_ticket(self) -> Ticket:
        self.next_ticket += 1
        return Ticket(self.next_ticket)

    def find_hit(self, request: Request, worker: Worker, leg: Leg) -> Hit | None:
        """How much of the prompt a row of this leg finds in the worker's prefix cache.

        None where the row is not cached; else it is opened with the hit, even of no tokens.
        The tokens that the request has brought are never part of it.
        """
        if leg is Leg.TARGET:
            return None
        return worker.books.find(
            request.unit_hashes,
            request.lengths.prompt,
            keeps_windows=keeps_windows(leg, worker.layout.swa_only_transfer),
        )

    def sit(
        self,
        request: Request,
        worker: Worker,
        leg: Leg,
        lengths: Lengths,
        *,
        is_early: bool = False,
    ) -> Seat | None:
        """Give the request a row and its first reserve of pages, all or nothing.

        Page runs begin with what its first query there reads, but for a hand-off that moves
        the whole prompt; those that are cached are in them.
        """
        hit = self.find_hit(request, worker, leg)
        if not worker.rows_free or self.shortage_now(worker, leg, lengths, hit) is not None:
            return None
        layout = worker.layout
        keeps = keeps_windows(leg, layout.swa_only_transfer)
        first_query = lengths.prompt if leg is Leg.TARGET else Tokens(0)
        if hit is not None:
            first_query = hit.tokens
        holding = worker.books.open(
            first_reserves(layout, leg, lengths),
            run_starts(layout.groups, first_query, keeps_windows=keeps),
            keeps_windows=keeps,
            hit=hit,
        )
        assert holding is not None, "what is available can be promised"
        row = worker.rows_free.popleft()
        seat = Seat(request, worker, row, holding, leg, lengths, is_early=is_early)
        worker.seats[row] = seat
        if is_early:
            worker.early[row] = seat
        worker.growing_count += seat.may_grow
        return seat

    def begin(self, request: Request, seat: Seat, now_us: int) -> None:
        """The request leaves the queue for its seat. The first time it takes its rank."""
        if not request.account.has_begun:
            request.rank = (-request.priority, self.next_rank)
            self.next_rank += 1
        computed = Tokens(seat.lengths.prompt - seat.holding.cached_tokens)
        self.waiting.begin(request, computed)
        self.begun_tokens.note(request.lengths.prompt, now_us)
        request.source = seat
        request.tries_early_beyond = Tokens(0)
        request.move(Phase.PREFILLING, now_us)

    def leave(self, seat: Seat) -> None:
        """Withdraw the seat's pages and row; they drain by the plan that is being written."""
        worker, request = seat.worker, seat.request
        for group, peak in zip(worker.layout.groups, seat.holding.peak, strict=True):
            request.pages_peak[group.name] = max(request.pages_peak.get(group.name, 0), peak)
        for chunk in seat.chunks:
            worker.turns.close(chunk.turn)
        if seat in worker.prefilling:
            worker.prefilling.remove(seat)
        worker.books.withdraw(seat.holding, worker.next_seq)
        if seat is request.seat:
            request.output_count_before = seat.output_count
        worker.rows.release(seat.row)
        worker.short.pop(seat.row, None)
        worker.early.pop(seat.row, None)
        del worker.seats[seat.row]
        worker.growing_count -= seat.may_grow
        worker.rows_draining.append((worker.next_seq, seat.row))
        worker.must_plan = True
        began_unsent = worker.forget_unsent(seat.row)
        if seat.is_started and not seat.is_ended and not began_unsent:
            worker.add(Stop(seat.row))
        if request.source is seat:
            request.source = None
        if request.target is seat:
            request.target = None
        if request.early is seat:
            request.early = None

    def void_pull(self, request: Request) -> None:
        """The pull under way, if any, is of no use: its target's pages are withdrawn."""
        if request.ticket is not None:
            seat = request.target if request.early is None else request.early
            assert seat is not None
            seat.worker.drop_pull(request.ticket)
            request.ticket = None
            self.leave(seat)

    def leave_early(self, request: Request) -> None:
        """The request's early seat, if any, goes, with its pull."""
        if request.early is not None:
            self.void_pull(request)
        if request.early is not None:
            self.leave(request.early)

    def keep_early(self, request: Request) -> None:
        """The request's early seat becomes its target, and is not taken back any more."""
        seat = request.early
        assert seat is not None
        seat.bring(request.output_count, request.since_us)
        seat.is_early = False
        del seat.worker.early[seat.row]
        seat.worker.growing_count += seat.may_grow
        request.early, request.target = None, seat

    def leave_all(self, request: Request) -> None:
        """The request has no place on any worker any more."""
        if request in self.awaiting_target:
            self.awaiting_target.remove(request)
        self.leave_early(request)
        self.void_pull(request)
        for seat in tuple(request.seats):
            self.leave(seat)

    def await_target(self, request: Request) -> None:
        """The request's prompt is finished, and it waits for a destination."""
        self.awaiting_target.append(request)
        self.awaiting_target.sort(key=lambda waiting: waiting.rank)
        self.newcomers.append(request)

    def enqueue(self, request: Request) -> None:
        """The request waits for admission."""
        self.waiting.add(request)
        self.newcomers.append(request)

    def requeue(self, request: Request, now_us: int) -> None:
        """The request waits anew, with its rank and the tokens that it has brought."""
        self.leave_all(request)
        request.move(Phase.WAITING, now_us)
        self.enqueue(request)

    def finish(
        self,
        request: Request,
        reason: EndReason,
        now_us: int,
        text: str = "",
        status: int = 200,
        kept: int | None = None,
    ) -> None:
        """End the request in whatever phase it is. Nothing of it is left but draining pages.

        `kept` is how many of its tokens were of use to the client, where it said so.
        """
        self._settle(request)
        phase = request.phase
        self.leave_all(request)
        request.move(Phase.FINISHED, now_us)
        del self.requests[request.request_id]
        mine = self.by_client[request.client]
        del mine[request.request_id]
        if not mine:
            del self.by_client[request.client]
        output_tokens = request.output_count if kept is None else kept
        usage = Usage(request.lengths.prompt, request.cached_tokens, output_tokens)
        self.commands.append(FinishRequest(request.request_id, reason, usage, text, status))
        self._summarise(request, phase, reason, now_us, text, output_tokens)

    def shortage_now(
        self, worker: Worker, leg: Leg, lengths: Lengths, hit: Hit | None
    ) -> tuple[int, Pages] | None:
        """The group of the worker that lacks pages for this leg to begin, and how many.

        Pages of the hit, if there is one, are there already.
        A leg that will grow begins only where each row that grows could still take a page:
        else the newcomer would soon give way again.
        """
        reserve = first_reserves(worker.layout, leg, lengths)
        if leg is not Leg.SOURCE:
            reserve = tuple(
                Pages(pages + worker.growing_count) if isinstance(group.reach, All) else pages
                for group, pages in zip(worker.layout.groups, reserve, strict=True)
            )
        return worker.books.shortage(reserve, hit)

    def check(self) -> None:
        """Assert every invariant of the state. Tests call it after each event."""
        for worker in self.workers.values():
            worker.check()
            for seat in worker.seats.values():
                check_seat(seat)
            for ticket, request in worker.tickets.items():
                assert request.ticket == ticket
        for request in self.requests.values():
            check_request(request)
            for seat in request.seats:
                assert seat.worker.seats.get(seat.row) is seat
            assert self.by_client[request.client][request.request_id] is request
            assert (request.phase is Phase.WAITING) == (request in self.waiting)
        assert len(self.waiting) == sum(r in self.waiting for r in self.requests.values())
        self.waiting.check()
        assert self.awaiting_target == sorted(
            (
                request
                for request in self.requests.values()
                if request.phase is Phase.HANDING_OFF and request.target is None
            ),
            key=lambda request: request.rank,
        )
        seat_count = sum(len(worker.seats) for worker in self.workers.values())
        assert seat_count == sum(len(tuple(r.seats)) for r in self.requests.values())

    def _settle(self, request: Request) -> None:
        """The last of its account, and its end in the queue if it waits there."""
        account, seat = request.account, request.source
        if request.phase is Phase.WAITING:
            self.waiting.leave(request)
        if not account.has_begun:
            return
        uncomputed = 0
        if request.phase is Phase.PREFILLING and request.output_count == 0:
            assert seat is not None
            uncomputed = seat.lengths.prompt - seat.given
        self.waiting.shares.end(account, request.output_count, uncomputed)

    def _summarise(
        self,
        request: Request,
        phase: Phase,
        reason: EndReason,
        now_us: int,
        text: str,
        output_tokens: int,
    ) -> None:
        times = request.times
        spent = times.spent_us
        self.record(
            LogEvent.REQUEST_FINISHED,
            request,
            reason=reason.value,
            phase=phase.value,
            text=text,
            tenant=request.tenant,
            prompt_tokens=request.lengths.prompt,
            max_tokens=request.lengths.output,
            cached_tokens=request.cached_tokens,
            output_tokens=output_tokens,
            charged_tokens=request.account.charged,
            queue_us=spent.get(Phase.WAITING),
            prefill_us=spent.get(Phase.PREFILLING),
            handoff_us=spent.get(Phase.HANDING_OFF),
            decode_us=spent.get(Phase.DECODING),
            total_us=now_us - times.received_us,
            ttft_us=None
            if times.first_token_us is None
            else times.first_token_us - times.received_us,
            bytes_moved=request.bytes_moved,
            bytes_saved=request.bytes_saved,
            preemptions=request.preemption_count,
            restarts=request.restart_count,
            **{f"pages_{name}_peak": peak for name, peak in request.pages_peak.items()},
            **{f"{leg}_worker": worker for leg, worker in request.workers.items()},
        )
