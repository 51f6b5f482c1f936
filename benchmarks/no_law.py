"""A baseline: a scheduler whose door looks at the full pool only, and that has no law.

What is modelled, and all of it:

1. *The door* accepts every prompt that fits the full pool of a worker that may run it. It asks
   neither for the pages of the output nor for those of other pools.
2. *Admission* is first come, first served, onto the worker with the fewest prompt positions to
   run. It takes a row and the prompt's pages of the full pool; the head waits for them.
3. *Everything else is taken as it goes*: window pages chunk by chunk, pages for output as the
   row grows. Out-of-window pages are given back between chunks and steps, as in the real
   core: the comparison is about the law, and not about that.
4. *Nobody gives way.* A prompt or a row without a page waits for one, and keeps what it has.
5. *A hand-off* needs a row, the prompt's pages of the full pool and the window's on a decode
   worker, first come, first served. Until then the prompt keeps its pages where it is.
6. *Patience*: a request without any progress for `patience_us`, in the queue or stuck, ends
   with a timeout, and only then are its pages free.

There is no prefix cache, no fairness and no priority. The order of a plan is the core's: rows
that decode, hand-offs, admission, chunks. Pages that are given back are free at once, which the
core may say only when its worker has answered: that is in this policy's favour.
"""

from collections import deque
from collections.abc import Sequence

from no_law_seats import Job, PlainWorker, Seat, page_ids
from tidegate.ipc.protocol import (
    Chunk,
    EndReason,
    Fetch,
    Grow,
    PlanSeq,
    PullGroup,
    RequestId,
    Role,
    Row,
    Ticket,
    Usage,
    WorkerId,
    unpack_ids,
)
from tidegate.kvcache.layout import All, Pages, Tokens
from tidegate.scheduler.commands import (
    AcceptRequest,
    Command,
    EmitTokens,
    FinishRequest,
    RefuseRequest,
    SendPlan,
    StartRow,
)
from tidegate.scheduler.events import Event, Reported, Submitted, WorkerJoined


class NoLaw:
    """The baseline as a policy. `chunk_tokens` is as the core's; rows take pages for
    `ahead_tokens` positions beyond the one that is settled."""

    def __init__(
        self,
        *,
        chunk_tokens: int,
        ahead_tokens: int,
        patience_us: int,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._ahead_tokens = ahead_tokens
        self._patience_us = patience_us
        self.workers: dict[WorkerId, PlainWorker] = {}
        self._jobs: dict[RequestId, Job] = {}  # The longest without progress first.
        self._waiting: deque[Job] = deque()
        self._prefilled: deque[Job] = deque()  # They wait for a decode worker.
        self._due: list[Seat] = []  # Rows that decode, and may need pages.
        self._pulls: dict[Ticket, Job] = {}
        self._ticket_count = 0
        self._commands: list[Command] = []

    @property
    def wake_us(self) -> int | None:
        oldest = next(iter(self._jobs.values()), None)
        return None if oldest is None else oldest.progress_us + self._patience_us

    # --- Events ---

    def apply(self, event: Event, now_us: int) -> None:
        """Raises `TypeError` for what the baseline knows nothing of: losses and cancels."""
        match event:
            case WorkerJoined():
                self.workers[event.worker] = PlainWorker(event)
            case Submitted():
                self._submit(event, now_us)
            case Reported():
                self._report(event, now_us)
            case _:
                raise TypeError(f"the baseline knows nothing of {type(event).__name__}")

    def _submit(self, submitted: Submitted, now_us: int) -> None:
        prompt, max_tokens = Tokens(submitted.prompt_tokens), submitted.max_tokens
        assert max_tokens is not None, "a trace says how many tokens each request had"
        roles = [[Role.BOTH, Role.PREFILL]]
        if max_tokens > 1:
            roles.append([Role.BOTH, Role.DECODE])
        if not all(
            any(w.holds(w.page_counts, prompt) for w in self._of_roles(each)) for each in roles
        ):
            text = "the prompt does not fit the full pool"
            self._commands.append(
                RefuseRequest(submitted.request_id, 400, "too_long", text, pool="full")
            )
            return
        job = self._jobs[submitted.request_id] = Job(submitted, max_tokens, now_us)
        self._waiting.append(job)
        self._commands.append(AcceptRequest(job.request_id, max_tokens))

    def _report(self, report: Reported, now_us: int) -> None:
        worker = self.workers[report.worker]
        for chunk in report.chunks:
            seat = worker.seats[chunk.row]
            worker.chunks_in_flight -= 1
            seat.chunk_until = None
            self._settle(seat, Tokens(chunk.until), now_us)
            if seat.job.settled == seat.job.prompt:
                worker.prefilling.remove(seat)
                seat.is_decoding = True
        if report.rows:
            self._commands.append(EmitTokens(report.report, report.rows))
        counts = unpack_ids(report.counts)
        for row, count in zip(unpack_ids(report.rows), counts, strict=True):
            seat = worker.seats[Row(row)]
            seat.job.output_count += count
            position = Tokens(seat.job.prompt + seat.job.output_count - 1)
            self._settle(seat, position, now_us)
            self._due.append(seat)
        for end in report.ended:
            seat = worker.seats[end.row]
            if seat.job.settled >= seat.job.end:
                worker.leave(seat, stop=False)
                self._finish(seat.job, EndReason.LENGTH, 200, "")
            else:
                seat.is_decoding = False
                self._prefilled.append(seat.job)
        for fetched in report.fetched:
            self._begin_decode(self._pulls.pop(fetched.ticket), now_us)

    def _settle(self, seat: Seat, position: Tokens, now_us: int) -> None:
        seat.job.settled = position
        seat.give_back(position)
        self._progress(seat.job, now_us)

    def _progress(self, job: Job, now_us: int) -> None:
        job.progress_us = now_us
        del self._jobs[job.request_id]
        self._jobs[job.request_id] = job

    def _finish(self, job: Job, reason: EndReason, status: int, text: str) -> None:
        del self._jobs[job.request_id]
        usage = Usage(job.prompt, 0, job.output_count)
        self._commands.append(FinishRequest(job.request_id, reason, usage, text, status))

    def _begin_decode(self, job: Job, now_us: int) -> None:
        """The prompt's pages have been copied: those of the source are free."""
        source, target = job.source, job.target
        assert source is not None and target is not None
        source.worker.leave(source, stop=False)
        job.source = None
        self._progress(job, now_us)
        target.is_decoding = True
        self._due.append(target)
        target.worker.operations.append(
            StartRow(
                target.row,
                job.request_id,
                job.settled,
                job.output_count,
                job.end,
                target.page_runs(),
            )
        )

    # --- Plans ---

    def plan(self, now_us: int) -> list[Command]:
        self._expire(now_us)
        self._grow(now_us)
        self._hand_off(now_us)
        self._admit(now_us)
        for worker in self.workers.values():
            self._hand_out_chunks(worker, now_us)
            if worker.operations:
                worker.seq = PlanSeq(worker.seq + 1)
                operations, worker.operations = tuple(worker.operations), []
                self._commands.append(SendPlan(worker.worker_id, worker.seq, operations))
        commands, self._commands = self._commands, []
        return commands

    def _expire(self, now_us: int) -> None:
        while (due_us := self.wake_us) is not None and due_us <= now_us:
            job = next(iter(self._jobs.values()))
            if job in self._waiting:
                self._waiting.remove(job)
            if job in self._prefilled:
                self._prefilled.remove(job)
            assert job.target is None or job.source is None, "a pull takes less than that"
            for seat in (job.source, job.target):
                if seat is not None:
                    assert seat.chunk_until is None, "a launch takes less than that"
                    seat.worker.leave(seat, stop=True)
            text = f"no progress for {self._patience_us / 1e6:g} s"
            self._finish(job, EndReason.TIMEOUT, 503, text)

    def _grow(self, now_us: int) -> None:
        """Pages for rows that decode, in the order in which their need was seen."""
        due, self._due = self._due, []
        for seat in due:
            worker, job = seat.worker, seat.job
            if worker.seats.get(seat.row) is not seat or not seat.is_decoding:
                continue
            until = Tokens(min(job.end, job.settled + self._ahead_tokens))
            for index in range(len(worker.groups)):
                if count := seat.take(index, until):
                    worker.operations.append(Grow(seat.row, index, page_ids(count)))
                    self._progress(job, now_us)
            if seat.covered <= job.settled < job.end:
                self._due.append(seat)  # It is stuck until somebody else leaves.

    def _hand_off(self, now_us: int) -> None:
        while self._prefilled:
            job = self._prefilled[0]
            workers = [w for w in self._of_roles([Role.DECODE]) if self._has_room(w, job)]
            if not workers:
                return
            self._prefilled.popleft()
            worker = max(workers, key=lambda w: w.free[0])
            source, target = job.source, worker.sit(job, job.end)
            assert source is not None
            job.target = target
            for index, group in enumerate(worker.groups):
                first = group.page_of(group.first_needed(job.prompt))
                target.firsts[index] = target.ends[index] = first
                target.take(index, job.prompt)
            self._start_pull(job, source, target, now_us)

    def _has_room(self, worker: PlainWorker, job: Job) -> bool:
        """For what is copied of the prompt."""
        return bool(worker.rows_free) and all(
            group.span(group.first_needed(job.prompt), job.prompt) <= free
            for group, free in zip(worker.groups, worker.free, strict=True)
        )

    def _start_pull(self, job: Job, source: Seat, target: Seat, now_us: int) -> None:
        self._ticket_count += 1
        ticket = Ticket(self._ticket_count)
        self._pulls[ticket] = job
        self._progress(job, now_us)
        groups = [
            PullGroup(
                group.start_of(Pages(first)), page_ids(end - first), page_ids(end - first)
            )
            for group, first, end in zip(
                target.worker.groups, target.firsts, target.ends, strict=True
            )
        ]
        joined = source.worker.joined
        target.worker.operations.append(
            Fetch(
                ticket,
                job.request_id,
                joined.pool,
                joined.incarnation,
                tuple(groups),
                job.prompt,
            )
        )

    def _admit(self, now_us: int) -> None:
        while self._waiting:
            job = self._waiting[0]
            workers = [
                worker
                for worker in self._of_roles([Role.BOTH, Role.PREFILL])
                if worker.rows_free and worker.holds(worker.free, job.prompt)
            ]
            if not workers:
                return
            self._waiting.popleft()
            worker = min(workers, key=lambda w: (w.prompt_backlog, -w.free[0]))
            limit = job.end if worker.role is Role.BOTH else job.prompt
            seat = job.source = worker.sit(job, limit)
            for index, group in enumerate(worker.groups):
                if isinstance(group.reach, All):
                    seat.take(index, job.prompt)
            worker.prefilling.append(seat)
            self._progress(job, now_us)
            worker.operations.append(
                StartRow(seat.row, job.request_id, 0, 0, seat.limit, seat.page_runs())
            )

    def _hand_out_chunks(self, worker: PlainWorker, now_us: int) -> None:
        """One launch of prompt positions; several prompts share the budget."""
        if worker.chunks_in_flight:
            return
        budget = self._chunk_tokens
        for seat in worker.prefilling:
            job = seat.job
            until = Tokens(min(job.prompt, job.settled + budget))
            for index in range(len(worker.groups)):
                if count := seat.take(index, until):
                    worker.operations.append(Grow(seat.row, index, page_ids(count)))
            until = Tokens(min(until, seat.covered))
            if until > job.settled:  # Else it is stuck, or the budget is spent.
                seat.chunk_until = until
                self._progress(job, now_us)
                worker.chunks_in_flight += 1
                worker.operations.append(Chunk(seat.row, until, until == job.prompt))
                budget -= until - job.settled

    def _of_roles(self, roles: Sequence[Role]) -> list[PlainWorker]:
        return [worker for worker in self.workers.values() if worker.role in roles]
