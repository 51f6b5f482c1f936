"""What the core knows: requests, the seats they have on workers, and the workers."""

from collections import deque
from collections.abc import Iterable, Sequence

from tidegate.ipc.protocol import (
    Chunk,
    Fetch,
    Incarnation,
    PlanSeq,
    PoolHandle,
    PoolId,
    RequestId,
    Role,
    Row,
    Ticket,
    WorkerId,
)
from tidegate.kvcache.books import Books, Holding
from tidegate.kvcache.demand import Leg, Lengths
from tidegate.kvcache.layout import Layout, Pages, Tokens
from tidegate.kvcache.prefix_node import UnitHash
from tidegate.scheduler.commands import PlanOperation, StartRow, is_of_row
from tidegate.scheduler.events import ClientId
from tidegate.scheduler.fairness import Account
from tidegate.scheduler.phases import Phase, check_move
from tidegate.scheduler.prefill_speed import PrefillSpeed
from tidegate.scheduler.pulled import Pulled
from tidegate.scheduler.row_arrays import NO_EVENT, RowArrays
from tidegate.scheduler.times import Times, due_us
from tidegate.scheduler.turns import Turns

Rank = tuple[int, int]  # (negated priority, admission number): the smallest goes first.


class Worker:
    """One worker: its books, its rows, and the plan that is being written for it."""

    def __init__(
        self,
        worker_id: WorkerId,
        role: Role,
        pool: PoolId,
        incarnation: Incarnation,
        handle: PoolHandle,
        books: Books,
        context: int,
        row_count: int,
        now_us: int,
        chunk: Tokens | None,
    ) -> None:
        """`chunk` bounds the prompt tokens in one launch; None means no bound."""
        self.worker_id = worker_id
        self.role = role
        self.pool = pool
        self.incarnation = incarnation
        self.handle = handle
        self.books = books
        self.context = context
        self.row_count = row_count
        self.rows_free: deque[Row] = deque(Row(index) for index in range(row_count))
        self.rows_draining: deque[tuple[PlanSeq, Row]] = deque()
        self.rows = RowArrays(row_count)
        self.seats: dict[Row, Seat] = {}
        self.growing_count = 0  # Seats that need a page now and then.
        self.early: dict[Row, Seat] = {}  # Seats that may be taken back at any time.
        self.short: dict[Row, Seat] = {}  # Seats with fewer pages than they would take.
        # The least that was available in each group since they tried.
        self.pages_seen = [Pages(0)] * len(books.pools)
        self.plans_since_wanted = 2  # Since somebody has waited for its pages.
        self.prefilling: list[Seat] = []  # Seats with prompt positions left, in order of rank.
        self.turns = Turns()
        self.prefill_speed = PrefillSpeed(chunk)
        self.tickets: dict[Ticket, Request] = {}
        self.seq = PlanSeq(0)  # The last plan sent.
        self.completed = PlanSeq(0)
        self.operations: list[PlanOperation] = []
        self.must_plan = False
        self.progress_us = now_us  # When it last brought something.
        # When it last completed a plan, or owed no answer to one, or ended the launch that was
        # under way when the next plan came: it takes plans between launches only.
        self.answered_us = now_us
        self.was_launching = False  # It has ended that one.
        self.suspect_since_us: int | None = None  # It gets no new work from then on.

    @property
    def is_suspect(self) -> bool:
        return self.suspect_since_us is not None

    @property
    def pages_are_wanted(self) -> bool:
        """Somebody waits for its pages, or did in the last plan."""
        return self.plans_since_wanted < 2

    @property
    def layout(self) -> Layout:
        return self.books.layout

    @property
    def next_seq(self) -> PlanSeq:
        """The number of the plan that is being written."""
        return PlanSeq(self.seq + 1)

    @property
    def is_working(self) -> bool:
        """It owes an answer: for a row, a pull, or pages that drain.

        A prompt that is finished and waits for a decode worker owes nothing, and neither does
        an early place without a pull.
        """
        is_draining = bool(self.rows_draining) or self.books.is_draining
        return is_draining or any(seat.is_active for seat in self.seats.values())

    @property
    def prompt_backlog(self) -> int:
        """Prompt positions of its rows that have still to run."""
        return sum(seat.lengths.prompt - seat.settled for seat in self.prefilling)

    def add(self, *operations: PlanOperation) -> None:
        self.operations.extend(operations)
        self.must_plan = True

    def forget_unsent(self, row: Row) -> bool:
        """Drop a row's operations from the plan being written, if the row begins there.

        The shell joins tokens to a `StartRow`, and those of a request that has ended are gone.
        """
        if not any(isinstance(op, StartRow) and op.row == row for op in self.operations):
            return False
        self.operations = [op for op in self.operations if not is_of_row(op, row)]
        return True

    def drop_pull(self, ticket: Ticket) -> None:
        """The pull is void. If it has not been sent, it will not be."""
        del self.tickets[ticket]
        self.operations = [
            op for op in self.operations if not (isinstance(op, Fetch) and op.ticket == ticket)
        ]

    def complete(self, plan: PlanSeq) -> None:
        self.completed = plan
        self.books.complete(plan)
        while self.rows_draining and self.rows_draining[0][0] <= plan:
            self.rows_free.append(self.rows_draining.popleft()[1])

    def check(self) -> None:
        self.books.check()
        rows = [*self.rows_free, *(row for _, row in self.rows_draining), *self.seats]
        assert sorted(rows) == list(range(self.row_count)), "a row is lost or in two places"
        assert all(seat.worker is self for seat in self.seats.values())
        assert sum(seat.may_grow for seat in self.seats.values()) == self.growing_count
        is_taken = [Row(row) in self.seats for row in range(self.row_count)]
        assert not self.rows.next_event[[not taken for taken in is_taken]].any()
        assert not self.rows.covered[[not taken for taken in is_taken]].any()
        assert all(self.seats.get(row) is seat for row, seat in self.short.items())
        assert self.early == {row: seat for row, seat in self.seats.items() if seat.is_early}
        self.turns.check(chunk.turn for seat in self.seats.values() for chunk in seat.chunks)
        for seat in self.prefilling:
            assert self.seats.get(seat.row) is seat


class Seat:
    """A request's place on a worker: a row and its pages.

    `settled` counts the positions that the worker has answered for. Nothing need be done for
    the pages of a decoding row until `settled` reaches `next_event`. Both are in the worker's
    arrays; see `row_arrays`.
    """

    def __init__(
        self,
        request: "Request",
        worker: Worker,
        row: Row,
        holding: Holding,
        leg: Leg,
        lengths: Lengths,
        *,
        is_early: bool = False,
    ) -> None:
        self.request = request
        self.worker = worker
        self.row = row
        self.holding = holding
        self.leg = leg
        # What was left of the request when it began here or on its source: to its prompt
        # belong the tokens that it had brought before.
        self.lengths = lengths
        self.chunks: deque[Chunk] = deque()  # That are with the worker, in order.
        self.is_started = False  # The worker has been sent a `Start` for the row.
        self.is_ended = False  # The worker has said that the row ended by itself.
        self.sits_out_at = lengths.end  # The position that the worker was told; see `limits`.
        self.is_early = is_early  # It may be taken back at any time; see `early`.
        self.pulled = Pulled()  # Of a target.
        self.is_due = False  # The next plan looks at its pages.
        self.is_asked_back = False  # The worker has yet to say which pages it gives back.
        self.needs_until = Tokens(0)  # It keeps, or has fed, what is below.
        worker.rows.take(
            row,
            settled=holding.cached_tokens,
            prompt=request.lengths.prompt,
            output_count=request.output_count,
            token_us=request.since_us,
        )

    @property
    def settled(self) -> Tokens:
        return Tokens(self.worker.rows.settled.item(self.row))

    @settled.setter
    def settled(self, position: Tokens) -> None:
        self.worker.rows.settled[self.row] = position

    @property
    def next_event(self) -> Tokens:
        return Tokens(self.worker.rows.next_event.item(self.row))

    @next_event.setter
    def next_event(self, position: Tokens) -> None:
        self.worker.rows.next_event[self.row] = position

    @property
    def chunk_until(self) -> Tokens | None:
        """Where the chunk ends that the worker answers next; None if it has none."""
        return Tokens(self.chunks[0].until) if self.chunks else None

    @property
    def given(self) -> Tokens:
        """Where the next chunk begins: up to there the worker has answered, or was asked."""
        return Tokens(self.chunks[-1].until) if self.chunks else self.settled

    @property
    def output_count(self) -> int:
        """Tokens of the request that are out."""
        return self.worker.rows.output_count.item(self.row)

    @property
    def token_us(self) -> int:
        """When the last of them came."""
        return self.worker.rows.token_us.item(self.row)

    @property
    def awaits_token(self) -> bool:
        """It has brought none since it was taken."""
        rows = self.worker.rows
        fed = rows.settled_before.item(self.row) + self.output_count
        return self.settled != fed

    def bring(self, output_count: int, now_us: int) -> None:
        """So many tokens of the request are out now."""
        self.worker.rows.output_count[self.row] = output_count
        self.worker.rows.token_us[self.row] = now_us

    def end(self) -> None:
        """The worker has said that the row is over, or has failed."""
        self.is_ended = True
        self.next_event = NO_EVENT

    @property
    def may_grow(self) -> bool:
        """Does it decode here to its end, and so need a page now and then?"""
        return self.leg is not Leg.SOURCE and not self.is_early

    @property
    def is_active(self) -> bool:
        """It neither ended, nor is it an early place without a pull."""
        return not self.is_ended and not (self.is_early and self.request.ticket is None)

    @property
    def owes(self) -> bool:
        """The worker has something to bring for it: it is active, and does not sit out."""
        is_decoding = self.request.phase is Phase.DECODING
        return self.is_active and not (is_decoding and self.request.is_held)

    @property
    def is_starving(self) -> bool:
        """It decodes, and no page holds the position that it would feed next."""
        return self.settled < self.lengths.end and self.holding.covered <= self.settled


class Request:
    """One request from the time that it is accepted until its last message."""

    def __init__(
        self,
        request_id: RequestId,
        client: ClientId,
        lengths: Lengths,
        account: Account,
        number: int,
        received_us: int,
        unit_hashes: Sequence[UnitHash],
        *,
        timeout_ms: int | None = None,
        total_timeout_ms: int | None = None,
        has_stop_text: bool = False,
    ) -> None:
        """The timeouts are the client's own: until the first token, and in all."""
        self.request_id = request_id
        self.client = client
        self.lengths = lengths
        self.account = account
        self.number = number  # In the order of arrival.
        self.unit_hashes = unit_hashes  # Of its prompt.
        self.cached_tokens = Tokens(0)  # Of its prompt, when it last began before any output.
        self.has_stop_text = has_stop_text  # Its client may find any token to be the last.
        self.is_held = False  # Its client does not keep up with reading.
        self._since_us = received_us
        self.timer_us: int | None = None  # When it will be looked at.
        self.times = Times(received_us)
        self.total_due_us = due_us(received_us, total_timeout_ms)
        self._first_token_due_us = due_us(received_us, timeout_ms)
        self.source: Seat | None = None
        self.target: Seat | None = None
        self.early: Seat | None = None  # What may become its target.
        self.tries_early_beyond = Tokens(0)  # When more is settled, it tries for one.
        self.output_count_before = 0  # Tokens that were out when it last left a seat.
        self.ticket: Ticket | None = None
        self.passed_count = 0  # Requests that went ahead of it; see `bypass`.
        self.passed_tokens = 0  # What those may come to.
        self.waits_for = ""  # As it was last recorded, in this wait.
        self.bytes_moved = 0
        self.bytes_saved = 0
        self.preemption_count = 0
        self.restart_count = 0  # Because a worker was lost.
        self.pages_peak: dict[str, int] = {}
        self.workers: dict[str, WorkerId] = {}
        self._phase = Phase.WAITING
        self._rank: Rank | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def priority(self) -> int:
        return self.account.line.priority

    @property
    def tenant(self) -> str:
        return self.account.line.tenant

    @property
    def has_rank(self) -> bool:
        return self._rank is not None

    @property
    def rank(self) -> Rank:
        """Its place among those that have begun, which it keeps."""
        assert self._rank is not None, "a request that has not begun has no rank"
        return self._rank

    @rank.setter
    def rank(self, rank: Rank) -> None:
        assert self._rank is None, "a rank never changes"
        self._rank = rank

    @property
    def seat(self) -> Seat | None:
        """Where it decodes, or will; else where its prompt runs."""
        return self.source if self.target is None else self.target

    @property
    def output_count(self) -> int:
        """Tokens that are out."""
        seat = self.seat
        return self.output_count_before if seat is None else seat.output_count

    @property
    def since_us(self) -> int:
        """The last named event; see `deadlines`. Tokens are told to the seat alone."""
        seat = self.seat
        return self._since_us if seat is None else max(self._since_us, seat.token_us)

    @since_us.setter
    def since_us(self, now_us: int) -> None:
        self._since_us = now_us

    @property
    def first_token_due_us(self) -> int | None:
        """The client's deadline for the first token, until that is there."""
        return self._first_token_due_us if self.times.first_token_us is None else None

    @property
    def remaining(self) -> Lengths:
        """What is left to run if it begins anew: its tokens so far belong to the prompt."""
        return Lengths(
            Tokens(self.lengths.prompt + self.output_count),
            Tokens(self.lengths.output - self.output_count),
        )

    def move(self, phase: Phase, now_us: int) -> None:
        check_move(self._phase, phase)
        self.times.leave(self._phase, now_us)
        self._phase = phase
        self.waits_for = ""

    @property
    def seats(self) -> Iterable[Seat]:
        seats = (self.early, self.source, self.target)
        return (seat for seat in seats if seat is not None)
