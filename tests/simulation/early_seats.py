"""What must hold of early destinations: nobody waits for one, and what is copied is right.

A pull is looked at when its answer arrives, and is still expected: by then nobody but the
pull has written to its target pages.
"""

from simulation.fake_worker import FakeWorker
from simulation.memory import Memory, Run, SimulationError
from simulation.scripts import Script, script_of
from tidegate.ipc.protocol import Fetch, Report, Ticket, WorkerId, unpack_ids
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.deadlines import in_time
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.state import Worker
from tidegate.scheduler.waits import open_choices, target_choice


class PullChecks:
    """Follows the pulls of one run by their tickets; raises `SimulationError`."""

    def __init__(self, scripts: dict[int, Script]) -> None:
        self.early_count = 0  # Pulls of a part that were expected to the end.
        self._scripts = scripts
        self._memories: dict[WorkerId, Memory] = {}
        self._fetches: dict[Ticket, Fetch] = {}

    def join(self, worker: FakeWorker) -> None:
        self._memories[worker.worker] = worker.memory

    def sent(self, fetch: Fetch) -> None:
        self._fetches[fetch.ticket] = fetch

    def answered(self, fleet: Fleet, name: WorkerId, report: Report) -> None:
        worker = fleet.workers.get(name)
        for result in report.fetched:
            fetch = self._fetches.pop(result.ticket)
            if worker is not None and result.ticket in worker.tickets and not result.error:
                script = script_of(fetch.request_id, self._scripts)
                self._check(self._memories[name], worker, fetch, script)
                request = worker.tickets[result.ticket]
                self.early_count += request.early is not None or not _is_whole(worker, fetch)

    def _check(self, memory: Memory, worker: Worker, fetch: Fetch, script: Script) -> None:
        """The copy has all of each page, but what no later step reads of the first of those of
        a group that moves its end only."""
        layout = worker.layout
        for index, (group, pull) in enumerate(zip(layout.groups, fetch.groups, strict=True)):
            first, rest = divmod(pull.first_position, group.page_tokens)
            start = pull.first_position
            if rest or start > fetch.length:
                raise SimulationError(f"a pull from {start}, which is no page's beginning")
            if not (group.is_window and layout.swa_only_transfer is False):
                start = max(start, group.first_needed(Tokens(fetch.length)))
            ids = unpack_ids(pull.target_ids)
            if ids:
                memory.expect(index, Run(first, ids), script, start, fetch.length)


def _is_whole(worker: Worker, fetch: Fetch) -> bool:
    """It brings all that there is of the prompt, with nothing before it."""
    seat = worker.tickets[fetch.ticket].target
    return (
        seat is not None
        and not seat.pulled.byte_count
        and (fetch.length == seat.lengths.prompt)
    )


def check_nobody_waits(fleet: Fleet) -> None:
    """After a plan: nobody waits for anything of a worker that has an early place on it."""
    for worker in fleet.workers.values():
        if not worker.early:
            continue
        for seat in worker.seats.values():
            if seat.owes and seat.request.phase is Phase.DECODING and seat.is_starving:
                raise SimulationError(
                    f"{seat.request.request_id} starves beside an early place"
                )
    choices = [target_choice(fleet, request) for request in fleet.awaiting_target[:1]]
    head = fleet.waiting.head()
    if head is not None:
        choices += in_time(fleet, head, open_choices(fleet, head), fleet.planned_us)
    for choice in choices:
        for worker in choice.workers:
            if worker.early:
                raise SimulationError(
                    f"somebody waits for {worker.worker_id}, early places or not"
                )
    if any(request.early is not None for request in fleet.awaiting_target):
        raise SimulationError("a prompt that must wait for a destination has an early place")
