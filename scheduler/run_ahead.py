"""How far the pages of a decoding row reach beyond what the scheduler knows to be settled.

The *lead* of a row is how many positions beyond its settled one its pages cover. A worker runs
on as far as that without asking, so a long lead spares the scheduler work, and bridges its
pauses; but pages that a row will need only later are of no use to it now. So:

- A row begins with `ahead_tokens`, for which pools are sized. The longer it has run here, the
  longer it will probably go on: it may lead by as many tokens as it has brought, up to
  `ahead_tokens_max`.
- No row leads by more than an equal share of the worker's available pages would cover.
- While somebody waits for pages of the worker, rows take the least, and what they hold beyond
  it is asked back; see `surplus`.

A row takes pages up to its whole lead when it has half of it left.
"""

import msgspec

from tidegate.kvcache.layout import Pages, Tokens
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.state import Seat, Worker

LEAST_PARTS = 4  # The least lead is this part of `ahead_tokens`.


class Lead(msgspec.Struct, frozen=True):
    """With fewer positions than `low`, a row takes pages for `high`.

    With `is_roomy`, pages that it reads no more need not come back at once.
    """

    low: Tokens
    high: Tokens
    is_roomy: bool


def lead_of(seat: Seat, settings: CoreSettings) -> Lead:
    worker, ahead = seat.worker, settings.ahead_tokens
    least = least_lead(settings)
    if worker.pages_are_wanted:
        return Lead(least, least, is_roomy=False)
    share = equal_share(worker)
    brought = seat.settled - seat.lengths.prompt
    wished = min(settings.ahead_tokens_max, max(ahead, brought))
    high = Tokens(max(least, min(wished, share)))
    low = Tokens(max(least, high // 2))
    return Lead(low, high, is_roomy=share >= settings.ahead_tokens_max)


def least_lead(settings: CoreSettings) -> Tokens:
    return Tokens(max(1, settings.ahead_tokens // LEAST_PARTS))


def equal_share(worker: Worker) -> Tokens:
    """What each growing row of the worker could cover with its available pages, in the group
    that has the fewest."""
    books, count = worker.books, max(1, worker.growing_count)
    return min(
        group.start_of(Pages(max(0, books.available(index)) // count))
        for index, group in enumerate(books.layout.groups)
    )
