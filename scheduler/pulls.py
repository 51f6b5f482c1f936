"""What a target is told to copy of its source's pages: one pull at a time.

1. While the prompt runs, the whole pages of its settled positions, of those groups that move
   as a whole: nothing writes to them any more. Of other groups only the end is ever read
   after the hand-off, and where that begins is known when the prompt is finished.
2. Then everything that later steps read and that is not there yet.
"""

from tidegate.ipc.protocol import Fetch, PullGroup, pack_ids
from tidegate.kvcache.books import Holding
from tidegate.kvcache.layout import All, Group, Tokens, whole_pages_end
from tidegate.kvcache.page_table import run_starts
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.state import Request, Seat

NOTHING = PullGroup(0, b"", b"")


def early_end(source: Seat) -> Tokens:
    """Up to where pages of the source's prompt could be copied although it still runs.

    With the flag `swa_only_transfer` false all of the prompt moves, as its pages are all held.
    """
    groups = source.worker.layout.groups
    whole = [group for group in groups if _moves_whole(group, source.holding)]
    return whole_pages_end(whole, source.settled)


def start_early_pull(fleet: Fleet, request: Request, target: Seat, until: Tokens) -> None:
    """Have the target copy the pages that are whole, up to `until`; see `early_end`."""
    assert target.pulled.until < until < target.lengths.prompt
    _start(
        fleet,
        request,
        target,
        until,
        [
            target.pulled.until if _moves_whole(group, target.holding) else None
            for group in target.worker.layout.groups
        ],
    )


def start_last_pull(fleet: Fleet, request: Request, target: Seat) -> None:
    """Have the target copy what is not there of [first_needed(L), L) of each group.

    With the flag `swa_only_transfer` false that is [0, L) of window groups, too.
    """
    groups, prompt = target.worker.layout.groups, target.lengths.prompt
    keeps = target.holding.keeps_windows
    _start(
        fleet,
        request,
        target,
        prompt,
        [
            Tokens(max(start, target.pulled.until))
            if _moves_whole(group, target.holding)
            else start
            for group, start in zip(
                groups, run_starts(groups, prompt, keeps_windows=keeps), strict=True
            )
        ],
    )


def _moves_whole(group: Group, holding: Holding) -> bool:
    return isinstance(group.reach, All) or (holding.keeps_windows and group.is_window)


def _start(
    fleet: Fleet, request: Request, target: Seat, until: Tokens, starts: list[Tokens | None]
) -> None:
    """Pull [start, until) of each group that has a start."""
    source = request.source
    assert source is not None and request.ticket is None
    groups: list[PullGroup] = []
    for index, start in enumerate(starts):
        if start is None:
            groups.append(NOTHING)
            continue
        target.worker.books.cover(target.holding, index, until, surplus=False)
        position, source_ids = source.holding.tables[index].run(start, until)
        target_position, target_ids = target.holding.tables[index].run(start, until)
        assert position == target_position and len(source_ids) == len(target_ids)
        groups.append(PullGroup(position, pack_ids(source_ids), pack_ids(target_ids)))
    ticket = fleet.new_ticket()
    request.ticket = ticket
    target.pulled.asked_until = until
    target.worker.tickets[ticket] = request
    target.worker.add(
        Fetch(
            ticket,
            request.request_id,
            source.worker.pool,
            source.worker.incarnation,
            tuple(groups),
            until,
        )
    )
