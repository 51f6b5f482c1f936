"""The resume law: what was accepted runs to its end, wherever it is made to begin anew.

At every output length, on an otherwise idle fleet, by preemption or by the loss of its worker,
the request brings exactly the tokens that it was promised: the desk's judge compares each one.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from simulation.instant import InstantFleet
from tidegate.ipc.protocol import EndReason, Role
from tidegate.kvcache.demand import Leg
from tidegate.kvcache.layout import All, Group, Layout, Tail, Tokens, Window
from tidegate.scheduler.commands import FinishRequest
from tidegate.scheduler.growth import preempt
from tidegate.scheduler.settings import CoreSettings

OUTPUTS = (2, 3, 6)
PAIR = (Role.PREFILL, Role.DECODE)
Pools = list[tuple[Role, tuple[int, ...]]]


def layout(page_tokens: int, window: int | None, flag: bool | None, tail: bool) -> Layout:
    groups = [Group("full", All(), Tokens(page_tokens), ())]
    if window is not None:
        groups.append(Group("window", Window(Tokens(window)), Tokens(page_tokens), ()))
    if tail:
        groups.append(Group("tail", Tail(Tokens(3), 1), Tokens(page_tokens), ()))
    return Layout(tuple(groups), flag)


LAYOUTS = [
    layout(page_tokens, window, flag, tail)
    for page_tokens in (1, 2, 3)
    for window, flag, tail in (
        (None, None, False),
        (3, True, False),
        (3, False, False),
        (4, True, True),
    )
]


def fleets(of: Layout) -> Iterator[Pools]:
    """Pools that hold little: each size of the full pools, and of the others two."""
    for full_source, full_target, other in product((2, 5), (3, 6), (3, 4)):
        source = (full_source, *(other for _ in of.groups[1:]))
        target = (full_target, *(other for _ in of.groups[1:]))
        yield [(Role.PREFILL, source), (Role.DECODE, target)]
    for full, other in product((3, 5), (3, 4)):
        yield [(Role.BOTH, (full, *(other for _ in of.groups[1:])))]


def begin_anew_at(fleet: InstantFleet, lengths: set[int]) -> None:
    """Have the request give way when it first has each of these numbers of tokens."""
    left = set(lengths)

    def look() -> None:
        core = fleet.desk.core.fleet
        for request in tuple(core.requests.values()):
            seats = list(request.seats)
            if request.output_count not in left or not seats:
                continue
            left.remove(request.output_count)
            if seats[-1].leg is Leg.SOURCE:
                core.requeue(request, 0)  # As when its prefill worker is lost.
            else:
                preempt(core, seats[-1], 0, by=request, pools="full")

    fleet.after_report = look
    fleet.desk.expects_ranks = False  # Here it gives way to nobody.


def lose_workers_at(fleet: InstantFleet, lengths: set[int]) -> None:
    """Lose the worker where the request is, at the first sight of each number of tokens."""
    left = set(lengths)

    def look() -> None:
        core = fleet.desk.core.fleet
        for request in tuple(core.requests.values()):
            seats = list(request.seats)
            if request.output_count in left and seats:
                left.remove(request.output_count)
                fleet.lose(seats[-1].worker.worker_id)

    fleet.after_report = look


def settings(chunk: int | None, ahead: int, *, caches: bool = True) -> CoreSettings:
    return CoreSettings(
        chunk_tokens=None if chunk is None else Tokens(chunk),
        ahead_tokens=Tokens(ahead),
        prefix_cache=caches,
    )


@pytest.mark.parametrize(("chunk", "ahead"), [(None, 3), (2, 1)])
def test_a_request_that_begins_anew_at_any_length_brings_all_its_tokens(
    chunk: int | None, ahead: int
) -> None:
    """With a cache, in which others' prompts and its own are found, and without."""
    anew, grown_too_long = 0, 0
    for of in LAYOUTS:
        for number, pools in enumerate(fleets(of)):
            caches = number % 3 > 0
            fleet = InstantFleet(of, pools, settings(chunk, ahead, caches=caches), checks=False)
            for prompt, output in product((1, 4, 7), OUTPUTS):
                if not isinstance(fleet.run(prompt, output), FinishRequest):
                    continue
                cases = [{length} for length in range(output)]
                cases.append(set(range(output)))  # At each of them, in one run.
                for case in cases:
                    begin_anew_at(fleet, case)
                    answer = fleet.run(prompt, output, shared_tokens=prompt)
                    fleet.after_report = lambda: None
                    assert isinstance(answer, FinishRequest)
                    assert answer.reason is EndReason.LENGTH, answer
                    assert answer.usage.output_tokens == output
                    anew += len(case)
                    source = pools[0]
                    last = prompt + max(case)
                    full_pages = of.groups[0].pages(Tokens(last))
                    grown_too_long += source[0] is Role.PREFILL and full_pages > source[1][0]
            fleet.desk.core.check()
    assert anew > 1000 and grown_too_long > 100


def test_a_request_whose_worker_is_lost_at_any_length_brings_all_its_tokens_on_another() -> (
    None
):
    anew = 0
    for of in LAYOUTS:
        for pools, (prompt, output) in product(fleets(of), ((1, 6), (4, 3), (5, 4), (7, 6))):
            for length in range(output):
                fleet = InstantFleet(of, pools * 2, settings(2, 3), checks=False)
                lose_workers_at(fleet, {length})
                answer = fleet.run(prompt, output)
                if isinstance(answer, FinishRequest):
                    assert answer.reason is EndReason.LENGTH, answer
                    assert answer.usage.output_tokens == output
                    anew += fleet.desk.restart_count
    assert anew > 500


def test_a_prompt_grown_beyond_the_prefill_pool_goes_on_where_it_decodes() -> None:
    of = layout(16, None, None, tail=False)
    pools: Pools = [(Role.PREFILL, (4096 // 16,)), (Role.DECODE, (8192 // 16,))]
    fleet = InstantFleet(of, pools, settings(512, 32), checks=False)
    begin_anew_at(fleet, {500})
    preempt_at_500, ran_on = fleet.after_report, list[str]()

    def look() -> None:
        preempt_at_500()
        for request in fleet.desk.core.fleet.requests.values():
            for seat in request.seats:
                place = f"{seat.leg.value} on {seat.worker.role.value}"
                if place not in ran_on:
                    ran_on.append(place)

    fleet.after_report = look
    answer = fleet.run(4000, 4000)
    assert isinstance(answer, FinishRequest)
    assert (answer.reason, answer.usage.output_tokens) == (EndReason.LENGTH, 4000)
    assert ran_on == ["source on prefill", "target on decode", "whole on decode"]
