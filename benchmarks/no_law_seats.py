"""What the baseline without a law knows: jobs, their seats, and workers' free pages.

See `no_law` for what it does with them. Pages are counted and have no names.
"""

from collections.abc import Iterable, Sequence

from tidegate.ipc.protocol import PageRun, PlanSeq, Row, Stop, pack_ids
from tidegate.kvcache.layout import All, Group, Pages, Tokens
from tidegate.scheduler.commands import PlanOperation
from tidegate.scheduler.events import Submitted, WorkerJoined


class Job:
    """A request that was accepted, and is not over. `settled` positions are answered for."""

    def __init__(self, submitted: Submitted, max_tokens: int, now_us: int) -> None:
        self.request_id = submitted.request_id
        self.prompt = Tokens(submitted.prompt_tokens)
        self.end = Tokens(submitted.prompt_tokens + max_tokens - 1)
        self.settled = Tokens(0)
        self.output_count = 0
        self.progress_us = now_us
        self.source: Seat | None = None
        self.target: Seat | None = None


class Seat:
    """A job's row on a worker, and its pages of each group: those from `firsts` to `ends`."""

    def __init__(self, job: Job, worker: "PlainWorker", row: Row, limit: Tokens) -> None:
        self.job = job
        self.worker = worker
        self.row = row
        self.limit = limit
        self.firsts = [0] * len(worker.groups)
        self.ends = [0] * len(worker.groups)
        self.chunk_until: Tokens | None = None
        self.is_decoding = False

    @property
    def covered(self) -> int:
        """Positions below this one have pages in every group."""
        return min(
            group.start_of(Pages(end))
            for group, end in zip(self.worker.groups, self.ends, strict=True)
        )

    def take(self, index: int, until: Tokens) -> int:
        """Pages of a group for positions below `until`, as many as are free; how many came."""
        wanted = self.worker.groups[index].pages(until) - self.ends[index]
        count = max(0, min(wanted, self.worker.free[index]))
        self.worker.free[index] -= count
        self.ends[index] += count
        return count

    def give_back(self, position: Tokens) -> None:
        """Free the pages that no query at `position` or later reads."""
        for index, group in enumerate(self.worker.groups):
            needed = min(self.ends[index], group.page_of(group.first_needed(position)))
            self.worker.free[index] += max(0, needed - self.firsts[index])
            self.firsts[index] = max(self.firsts[index], needed)

    def page_runs(self) -> tuple[PageRun, ...]:
        return tuple(
            PageRun(group.start_of(Pages(first)), page_ids(end - first))
            for group, first, end in zip(
                self.worker.groups, self.firsts, self.ends, strict=True
            )
        )


class PlainWorker:
    """What this scheduler knows of a worker. `free` counts the free pages of each group."""

    def __init__(self, joined: WorkerJoined) -> None:
        self.worker_id = joined.worker
        self.role = joined.role
        self.joined = joined
        self.groups: Sequence[Group] = joined.layout.groups
        self.page_counts = joined.handle.page_counts
        self.free = list(joined.handle.page_counts)
        self.rows_free = list(reversed(range(joined.row_count)))
        self.seats: dict[Row, Seat] = {}
        self.prefilling: list[Seat] = []
        self.chunks_in_flight = 0
        self.operations: list[PlanOperation] = []
        self.seq = PlanSeq(0)

    @property
    def prompt_backlog(self) -> int:
        return sum(seat.job.prompt - seat.job.settled for seat in self.prefilling)

    def holds(self, free: Iterable[int], prompt: Tokens) -> bool:
        """Do so many pages of each group hold the prompt, of the groups that keep it all?"""
        return all(
            not isinstance(group.reach, All) or group.pages(prompt) <= count
            for group, count in zip(self.groups, free, strict=True)
        )

    def sit(self, job: Job, limit: Tokens) -> Seat:
        row = Row(self.rows_free.pop())
        seat = self.seats[row] = Seat(job, self, row, limit)
        return seat

    def leave(self, seat: Seat, *, stop: bool) -> None:
        """Take back the row and its pages; `stop` if the worker does not know that it ended."""
        if stop:
            self.operations.append(Stop(seat.row))
        del self.seats[seat.row]
        self.rows_free.append(seat.row)
        for index in range(len(self.groups)):
            self.free[index] += seat.ends[index] - seat.firsts[index]
        if seat in self.prefilling:
            self.prefilling.remove(seat)


def page_ids(count: int) -> bytes:
    """Stand-ins for so many page ids: nobody looks at which pages they are."""
    return pack_ids([0] * count)
