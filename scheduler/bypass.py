"""Passing: what fits may go ahead of the first of the queue while that waits for pages.

A large prompt that waits for pages which others hold would keep everybody behind it waiting,
also those for whom there is room. So requests behind it, of its priority, may begin if they
fit in what is left. They take pages that it might have had earlier: therefore what may pass
one request is bounded, by number and by what it may come to in all. When that is used up
nobody passes it any more. Then what runs ends some time, nobody else takes the pages, and it
begins: it cannot starve, and waits longer by no more than what has passed it takes.

1. A request that has begun and lost its place is passed by nobody.
2. Nobody passes one whose pages are on their way: it begins as soon as its worker answers.
3. A tenant that is further ahead than the bound passes no other: so the bound on how far two
   tenants differ grows by it, and no more.

Each plan looks at some of those behind the first, whatever the length of the queue.
"""

from tidegate.scheduler.fairness import DECODE_COST
from tidegate.scheduler.fleet import Fleet
from tidegate.scheduler.state import Request

LOOK_COUNT_MAX = 4  # Requests behind the first that a plan tries.


def cost_of(request: Request) -> int:
    """What a request may be charged in all."""
    return request.lengths.prompt + DECODE_COST * request.lengths.output


def behind(fleet: Fleet, head: Request) -> list[Request]:
    """Those that may be tried in place of the head, which waits for pages, in order."""
    if head.account.has_begun or head.passed_count >= fleet.settings.bypass_count_max:
        return []
    return fleet.waiting.behind(LOOK_COUNT_MAX)


def may_pass(fleet: Fleet, head: Request, request: Request) -> bool:
    settings = fleet.settings
    tokens = head.passed_tokens + cost_of(request)
    ahead = request.account.line.clock - head.account.line.clock
    return (
        head.passed_count < settings.bypass_count_max
        and tokens <= settings.bypass_tokens_max
        and ahead <= settings.bypass_tokens_max
    )


def note_pass(head: Request, request: Request) -> None:
    head.passed_count += 1
    head.passed_tokens += cost_of(request)
