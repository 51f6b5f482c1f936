"""One plan: deadlines, growth, destinations, admission, chunks, and then the messages.

The order is that of holding: rows that decode first, then prompts that are finished, then
prompts that run, then those that wait; last comes what prompts that run move early, into room
that nobody else has asked for. All of it is derived from the state at hand; nothing is
remembered from one plan to the next but the queues themselves.
"""

from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import EndReason, Poison, pack_ids
from tidegate.scheduler.chunks import hand_out_chunks
from tidegate.scheduler.commands import SendPlan
from tidegate.scheduler.deadlines import expire
from tidegate.scheduler.early import move_early
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.growth import grow_decoding
from tidegate.scheduler.losses import judge_workers
from tidegate.scheduler.placement import admit_waiting, assign_targets
from tidegate.scheduler.wait_records import note_newcomers


def make_plan(fleet: Fleet, now_us: int) -> None:
    fleet.planned_us = now_us
    judge_workers(fleet, now_us)
    expire(fleet, now_us)
    for worker in fleet.workers.values():
        worker.plans_since_wanted += 1
    grow_decoding(fleet, now_us)
    assign_targets(fleet, now_us)
    admit_waiting(fleet, now_us)
    note_newcomers(fleet)
    for worker in fleet.workers.values():
        if not worker.is_suspect:
            hand_out_chunks(fleet, worker, now_us)
    move_early(fleet)
    fail_stuck_heads(fleet, now_us)
    send_plans(fleet, now_us)


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
            f"{worker.worker_id}: "
            f"{[pool.free_count + pool.idle_count for pool in worker.books.pools]} free "
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
            worker.was_launching = False
        worker.seq = worker.next_seq
        operations = (*poison, *worker.operations)
        worker.operations = []
        worker.must_plan = False
        fleet.commands.append(SendPlan(worker.worker_id, worker.seq, operations))
