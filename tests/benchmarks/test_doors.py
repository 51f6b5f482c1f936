"""The doors that are compared with ours: one caps prompts, the other has no law."""

import pytest

from doors import WindowCapped
from fakes.benchmark_fleets import (
    PATIENCE_US,
    core,
    no_law,
    run,
    workers,
)
from goodput import Ending
from no_law import NoLaw
from tidegate.ipc.protocol import Role, WorkerId
from tidegate.scheduler.events import WorkerLost

BOTH = [Role.BOTH]
SPLIT = [Role.PREFILL, Role.DECODE]


def endings(*expected: Ending) -> list[Ending | None]:
    return list(expected)


# --- The window cap ---


def test_the_cap_is_the_window_pool_and_ours_takes_what_it_refuses() -> None:
    requests = ((0, 40, 4), (0, 41, 4))  # The window pool has 10 pages of 4.
    capped = run(WindowCapped(core()), workers(BOTH, 64, 10), *requests)
    assert [f.ending for f in capped.fates] == endings(Ending.COMPLETE, Ending.REFUSED)
    ours = run(core(), workers(BOTH, 64, 10), *requests)
    assert [f.ending for f in ours.fates] == endings(Ending.COMPLETE, Ending.COMPLETE)


def test_the_smallest_window_pool_of_all_workers_caps() -> None:
    fleet = [*workers([Role.PREFILL], 64, 20), *workers([Role.DECODE], 64, 10)]
    capped = run(WindowCapped(core()), fleet, (0, 41, 4), (0, 40, 4))
    assert [f.ending for f in capped.fates] == endings(Ending.REFUSED, Ending.COMPLETE)


# --- Without a law ---


@pytest.mark.parametrize("roles", [BOTH, SPLIT, [Role.PREFILL, *SPLIT, Role.DECODE]])
def test_with_room_for_all_the_baseline_serves_as_the_core_does(roles: list[Role]) -> None:
    requests = [(n * 700, 8 + n * 7 % 90, 1 + n % 23) for n in range(30)]
    plain = run(no_law(), workers(roles, 400, 200), *requests)
    ours = run(core(), workers(roles, 400, 200), *requests)
    for (_, _, output), fate, other in zip(requests, plain.fates, ours.fates, strict=True):
        assert (fate.ending, fate.token_count) == (Ending.COMPLETE, output)
        assert other.ending is Ending.COMPLETE
    # Where rows run decides who shares a step, and the two place them by pages of their own.
    assert plain.last_us == pytest.approx(ours.last_us, rel=0.15)


def test_it_accepts_a_prompt_whose_output_never_fits_and_that_hangs() -> None:
    # 32 positions of the full pool: the prompt fits, and 13 of the 20 tokens that follow.
    request = (0, 20, 20)
    (fate,) = run(no_law(), workers(BOTH, 8, 16), request).fates
    assert fate.ending is Ending.HUNG and fate.token_count == 13
    (refused,) = run(core(), workers(BOTH, 8, 16), request).fates
    assert refused.ending is Ending.REFUSED


def test_it_refuses_only_what_does_not_fit_the_full_pool() -> None:
    found = run(no_law(), workers(BOTH, 8, 16), (0, 33, 1), (0, 32, 1))
    assert [f.ending for f in found.fates] == endings(Ending.REFUSED, Ending.COMPLETE)
    found = run(no_law(), [*workers(SPLIT, 8, 16)], (0, 33, 1))
    assert found.fates[0].ending is Ending.REFUSED


def test_rows_that_wait_for_one_another_hang_until_the_first_gives_up() -> None:
    # Two prompts fill the pool, and both want to grow: neither can, until one times out.
    requests = ((0, 16, 16), (0, 16, 16))
    found = run(no_law(), workers(BOTH, 8, 16), *requests)
    assert sorted(str(f.ending) for f in found.fates) == [
        str(Ending.COMPLETE),
        str(Ending.HUNG),
    ]
    assert found.last_us > PATIENCE_US
    ours = run(core(), workers(BOTH, 8, 16), *requests)
    assert [f.ending for f in ours.fates] == endings(Ending.COMPLETE, Ending.COMPLETE)
    assert ours.last_us < PATIENCE_US


def test_whoever_waits_behind_them_times_out_in_the_queue_or_runs_once_they_are_gone() -> None:
    hang = (0, 20, 20)
    found = run(no_law(), workers(BOTH, 8, 16), hang, (10, 20, 2), (900_000, 20, 2))
    assert found.fates[0].ending is Ending.HUNG
    assert found.fates[1].ending is Ending.TIMED_OUT
    assert found.fates[2].ending is Ending.COMPLETE


def test_a_finished_prompt_without_room_on_a_decode_worker_keeps_its_pages() -> None:
    fleet = [*workers([Role.PREFILL], 16, 16), *workers([Role.DECODE], 8, 16)]
    # The first hangs on the decode worker; the second waits for it beside its prefill pages.
    found = run(no_law(), fleet, (0, 20, 20), (10, 24, 4), (900_000, 60, 1))
    assert [f.ending for f in found.fates][:2] == endings(Ending.HUNG, Ending.HUNG)
    # The third needs nearly all of the prefill worker, of which the second holds a part.
    assert found.fates[2].ending is Ending.COMPLETE
    assert (found.fates[2].ttft_us or 0) > 100_000


def test_after_any_run_every_page_and_row_of_the_baseline_is_free() -> None:
    policy = no_law()
    requests = [(n * 300, 8 + n * 11 % 60, 1 + n % 23) for n in range(80)]
    found = run(policy, workers(SPLIT, 20, 12), *requests)
    assert {f.ending for f in found.fates} >= {Ending.COMPLETE, Ending.HUNG}
    for worker in policy.workers.values():
        assert worker.free == list(worker.page_counts)
        assert len(worker.rows_free) == worker.joined.row_count and not worker.seats


def test_the_baseline_says_what_it_knows_nothing_of() -> None:
    with pytest.raises(TypeError, match="WorkerLost"):
        NoLaw(chunk_tokens=1, ahead_tokens=1, patience_us=1).apply(
            WorkerLost(WorkerId("w"), "gone"), 0
        )
