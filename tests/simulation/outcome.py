"""What a run of the simulator came to, or several of them together."""

import msgspec

from tidegate.scheduler.phases import Phase


class Outcome(msgspec.Struct):
    """What a run came to. Counts are of requests, but where a name says otherwise."""

    submitted: int = 0
    complete: int = 0
    refused: int = 0
    ended_early: int = 0
    token_count: int = 0
    cached_tokens: int = 0
    event_count: int = 0
    stale_answer_count: int = 0
    given_back_count: int = 0  # Pages that rows held ahead, and gave back.
    early_count: int = 0  # Places that prompts took while they ran,
    early_lost_count: int = 0  # those that were taken back or lost, and
    early_pull_count: int = 0  # pulls of a part of a prompt.
    preemption_count: int = 0
    fence_count: int = 0
    queue_timeout_count: int = 0
    pass_count: int = 0  # Requests that began before one that waited for pages.
    restart_count: int = 0  # How often a request has begun anew because a worker was lost.
    cancelled_in: dict[Phase, int] = msgspec.field(default_factory=dict[Phase, int])


def add(total: Outcome, outcome: Outcome) -> None:
    total.submitted += outcome.submitted
    total.complete += outcome.complete
    total.refused += outcome.refused
    total.ended_early += outcome.ended_early
    total.token_count += outcome.token_count
    total.fence_count += outcome.fence_count
    total.cached_tokens += outcome.cached_tokens
    total.event_count += outcome.event_count
    total.stale_answer_count += outcome.stale_answer_count
    total.given_back_count += outcome.given_back_count
    total.early_count += outcome.early_count
    total.early_lost_count += outcome.early_lost_count
    total.early_pull_count += outcome.early_pull_count
    total.preemption_count += outcome.preemption_count
    total.pass_count += outcome.pass_count
    total.restart_count += outcome.restart_count
    total.queue_timeout_count += outcome.queue_timeout_count
    for phase, count in outcome.cancelled_in.items():
        total.cancelled_in[phase] = total.cancelled_in.get(phase, 0) + count
