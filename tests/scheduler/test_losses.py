"""Workers die, stall, and come back: who ends, who goes on, and who may join."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    SETTINGS,
    STALL_US,
    B,
    CoreBench,
    D,
    P,
    cancelled,
    finished,
    handle,
    joined,
    lost,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import (
    EndReason,
    Fetch,
    Incarnation,
    Peer,
    PeerGone,
    PoolId,
    RequestId,
    Role,
    Row,
    WorkerId,
)
from tidegate.scheduler.commands import Command, FenceWorker, RefuseRequest, StartRow
from tidegate.scheduler.phases import Phase

COUNTS = (12, 6)
FENCE_US = SETTINGS.fence_timeout_us
D2, P2, B2 = WorkerId("d2"), WorkerId("p2"), WorkerId("b2")


def pair(rows: int = 4) -> CoreBench:
    return CoreBench(
        joined(P, Role.PREFILL, COUNTS, rows=rows), joined(D, Role.DECODE, COUNTS, rows=rows)
    )


def reach(bench: CoreBench, phase: Phase) -> None:
    """Bring request "r" into the phase; HANDING_OFF with the pull under way."""
    match phase:
        case Phase.PREFILLING:
            bench.turn(submitted("r", 16, 4))
        case Phase.HANDING_OFF:
            bench.prefill("r", 16, 4)
        case _:
            bench.hand_over("r", 16, 4)
    assert bench.phase("r") is phase


@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        (Phase.PREFILLING, P),
        (Phase.HANDING_OFF, D),
        (Phase.DECODING, D),
    ],
)
def test_a_lost_worker_ends_the_requests_that_have_a_place_on_it(
    phase: Phase, victim: WorkerId
) -> None:
    bench = pair()
    reach(bench, phase)
    commands = bench.turn(lost(victim))
    answer = finished(commands)["r"]
    assert (answer.reason, answer.status) == (EndReason.ERROR, 503)
    assert answer.text == f"worker {victim} is gone: it was killed"
    other = D if victim == P else P
    bench.turn(report(other, bench.worker(other).seq))
    assert bench.free(other) == list(COUNTS)
    assert bench.core.is_idle


def test_a_finished_prompt_whose_worker_is_lost_during_the_pull_runs_whole_where_it_may() -> (
    None
):
    bench = pair()
    reach(bench, Phase.HANDING_OFF)
    commands = bench.turn(lost(P))
    assert finished(commands) == {}
    # No prefill worker is left. The decode worker feeds the prompt and the token anew.
    (start, *_) = [op for op in plan_of(commands, D).operations if isinstance(op, StartRow)]
    assert (start.position, start.output_index, start.limit) == (0, 1, 19)
    assert bench.core.fleet.requests[RequestId("r")].restart_count == 1
    # What the pull was to fill drains until the worker has passed the plan that withdrew it.
    assert bench.draining(D) == [4, 2]
    bench.turn(report(D, bench.worker(D).seq - 1))
    assert bench.draining(D) == [4, 2]
    bench.turn(report(D, bench.worker(D).seq))
    assert bench.draining(D) == [0, 0] and bench.phase("r") is Phase.PREFILLING


def test_a_decoding_request_outlives_its_prefill_worker() -> None:
    bench = pair()
    reach(bench, Phase.DECODING)
    assert finished(bench.turn(lost(P))) == {}
    last = report(D, 3, tokens={0: 3}, ended={0: EndReason.LENGTH})
    assert finished(bench.turn(last))["r"].reason is EndReason.LENGTH


def test_waiting_requests_that_no_worker_can_run_any_more_end_with_the_loss() -> None:
    bench = pair(rows=1)
    bench.turn(submitted("r", 16, 4), submitted("pair", 16, 4), submitted("one", 16, 1))
    ended = finished(bench.turn(lost(D)))
    # The prompt that runs would find no decode worker; one token needs none.
    assert sorted(ended) == ["pair", "r"]
    assert all(answer.status == 503 for answer in ended.values())
    because = "the workers that could run it are gone or make no progress: "
    assert ended["pair"].text == because + "there is no decode worker"
    assert ended["r"].text == because + "no decode worker is left that holds it"
    assert bench.phase("one") is Phase.WAITING


def test_a_finished_prompt_ends_when_the_only_worker_that_could_decode_it_dies() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, COUNTS),
        joined(D, Role.DECODE, COUNTS),
        joined(D2, Role.DECODE, (3, 3)),
    )
    bench.hand_over("large", 40, 8)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("waits", 30, 8)
    assert bench.phase("waits") is Phase.HANDING_OFF and not bench.worker(D).tickets
    assert sorted(finished(bench.turn(lost(D)))) == ["large", "waits"]
    bench.turn(report(P, bench.worker(P).seq))
    assert bench.free(P) == list(COUNTS)


def test_the_others_are_told_that_a_pool_is_gone_and_of_the_new_one() -> None:
    bench = pair()
    plan = plan_of(bench.turn(lost(P)), D)
    assert plan.operations == (PeerGone(PoolId("p/1"), Incarnation(1)),)
    plan = plan_of(bench.turn(joined(P, Role.PREFILL, (9, 5), incarnation=2)), D)
    assert plan.operations == (Peer(PoolId("p/2"), Incarnation(2), handle(P, (9, 5))),)


def test_a_pull_names_the_incarnation_of_its_source() -> None:
    bench = pair()
    bench.turn(lost(P))
    bench.turn(joined(P, Role.PREFILL, COUNTS, incarnation=2))
    bench.turn(submitted("r", 8, 4))
    done = report(P, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.LENGTH})
    (pull,) = plan_of(bench.turn(done), D).operations
    assert isinstance(pull, Fetch)
    assert (pull.source_pool, pull.source_incarnation) == ("p/2", 2)


def test_a_worker_comes_back_with_empty_pools_and_new_requests_run_on_it() -> None:
    bench = pair()
    reach(bench, Phase.PREFILLING)
    bench.turn(lost(P))
    bench.turn(joined(P, Role.PREFILL, COUNTS, incarnation=2))
    assert bench.free(P) == list(COUNTS)
    bench.hand_over("next", 8, 4)
    assert bench.phase("next") is Phase.DECODING


def test_a_report_of_a_worker_that_is_gone_is_dropped() -> None:
    bench = pair()
    reach(bench, Phase.PREFILLING)
    bench.turn(lost(P))
    assert bench.turn(report(P, 1, chunks={0: 8}), lost(P)) == []
    assert bench.core.fleet.stale_count == 1


# --- Workers without progress ---


def test_a_worker_that_owes_an_answer_for_too_long_is_suspect_and_its_requests_end() -> None:
    bench = pair()
    reach(bench, Phase.DECODING)
    bench.turn(report(P, bench.worker(P).seq))
    bench.now_us = STALL_US - 1
    assert bench.core.wake_us == STALL_US
    assert bench.turn() == []
    bench.now_us = STALL_US
    answer = finished(bench.turn())["r"]
    assert (answer.reason, answer.status) == (EndReason.TIMEOUT, 503)
    assert answer.text == "worker d gave no answer for 10 s"
    assert [
        r.fields["worker"] for r in bench.records if r.event is LogEvent.WORKER_SUSPECT
    ] == ["d"]


def test_a_plan_is_answered_after_the_launch_that_was_under_way_when_it_came() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (40, 12)))
    bench.decode_whole("r", 8, 30)
    bench.decode_whole("gone", 8, 30)
    seq = bench.worker(B).seq
    bench.turn(report(B, seq, tokens={0: 1, 1: 1}))
    # Each launch takes nearly all of the time, and this plan comes just after one has begun.
    bench.turn(cancelled("gone"))
    bench.now_us = STALL_US - 1
    bench.turn(report(B, seq, tokens={0: 1}))
    bench.now_us = 2 * STALL_US - 3
    assert not bench.worker(B).is_suspect
    bench.turn(report(B, seq + 1, tokens={0: 1}))
    # The next one, too.
    bench.turn(cancelled("r"))
    bench.now_us = 3 * STALL_US - 5
    bench.turn(report(B, seq + 1, tokens={0: 1}))
    bench.now_us = 4 * STALL_US - 7
    bench.turn(report(B, bench.worker(B).seq))
    assert not bench.worker(B).is_suspect and bench.core.is_idle


def test_a_worker_that_completes_no_plan_is_suspect_though_its_rows_go_on() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (40, 12)))
    bench.decode_whole("r", 8, 30)
    bench.decode_whole("gone", 8, 30)
    bench.now_us = STALL_US // 2
    bench.turn(report(B, bench.worker(B).seq, tokens={0: 1, 1: 1}))
    seq = bench.worker(B).completed
    bench.turn(cancelled("gone"))
    for step in range(3, 6):
        bench.now_us = step * STALL_US // 4
        bench.turn(report(B, seq, tokens={0: 1}))
    bench.now_us = STALL_US * 7 // 4 - 1
    bench.turn(report(B, seq, tokens={0: 1}))
    assert not bench.worker(B).is_suspect
    # Since the launch that was under way when the plan came.
    bench.now_us = STALL_US * 7 // 4
    assert finished(bench.turn(report(B, seq, tokens={0: 1}))).keys() == {"r"}
    assert bench.worker(B).is_suspect


def test_an_idle_worker_that_does_not_answer_a_plan_gets_no_work() -> None:
    bench = pair()
    bench.turn(lost(P))
    bench.now_us = STALL_US
    bench.turn(joined(P, Role.PREFILL, COUNTS, incarnation=2))
    assert bench.worker(D).is_suspect
    (refused,) = bench.turn(submitted("r", 8, 4))
    assert isinstance(refused, RefuseRequest) and refused.status == 503


def test_a_suspect_worker_gets_nothing_new_until_it_has_answered_for_everything() -> None:
    bench = CoreBench(joined(B, Role.BOTH, COUNTS), joined(B2, Role.BOTH, (8, 6)))
    bench.turn(submitted("r", 8, 4))
    bench.now_us = STALL_US
    bench.turn()
    assert bench.worker(B).is_suspect
    assert bench.worker(B2).seats[Row(0)].request.request_id == "r"
    bench.turn(submitted("next", 8, 4))
    assert bench.worker(B2).seats[Row(1)].request.request_id == "next"
    # Answers to the first plan only: the withdrawal is not seen yet.
    bench.turn(report(B, 1, chunks={0: 8}))
    assert bench.worker(B).is_suspect and bench.free(B) != list(COUNTS)
    bench.turn(report(B, 2))
    assert not bench.worker(B).is_suspect and bench.free(B) == list(COUNTS)
    bench.turn(submitted("third", 8, 4))
    assert bench.worker(B).seats[Row(1)].request.request_id == "third"


def test_a_stalled_worker_that_dies_takes_its_pages_with_it() -> None:
    bench = pair()
    reach(bench, Phase.PREFILLING)
    bench.now_us = STALL_US
    bench.turn()
    bench.turn(lost(P))
    assert bench.core.is_idle
    bench.turn(joined(P, Role.PREFILL, COUNTS, incarnation=2))
    assert bench.free(P) == list(COUNTS) and not bench.worker(P).is_suspect


def test_a_prompt_that_waits_for_a_decode_worker_is_no_debt_of_its_prefill_worker() -> None:
    bench = pair()
    bench.hand_over("first", 40, 8)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("waits", 16, 20)
    for step in range(1, 5):
        bench.now_us = step * STALL_US * 9 // 10
        bench.turn(report(D, bench.worker(D).seq, tokens={0: 1}))
    assert not bench.worker(P).is_suspect
    assert bench.phase("waits") is Phase.HANDING_OFF


def test_finished_prompts_end_when_every_decode_worker_that_fits_them_stalls() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, COUNTS),
        joined(D, Role.DECODE, COUNTS),
        joined(D2, Role.DECODE, (3, 3)),
    )
    bench.hand_over("first", 40, 8)
    bench.turn(report(P, bench.worker(P).seq))
    bench.prefill("waits", 16, 20)
    bench.now_us = STALL_US
    assert sorted(finished(bench.turn())) == ["first", "waits"]


def test_those_that_only_a_stalled_worker_could_run_do_not_block_the_queue() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (20,), FULL_ONLY, rows=1),
        joined(B2, Role.BOTH, (5,), FULL_ONLY, rows=1),
    )
    bench.turn(submitted("r", 60, 4), submitted("large", 60, 4), submitted("small", 8, 4))
    assert bench.phase("small") is Phase.WAITING
    bench.now_us = STALL_US
    assert sorted(finished(bench.turn())) == ["large", "r"]
    assert bench.phase("small") is Phase.PREFILLING


def test_a_worker_that_owed_nothing_for_long_is_given_its_full_time() -> None:
    bench = pair()
    bench.now_us = 10 * STALL_US
    bench.turn(submitted("r", 8, 4))
    bench.now_us += STALL_US - 1
    bench.turn()
    assert not bench.worker(P).is_suspect and bench.phase("r") is Phase.PREFILLING


def test_pages_that_drain_on_a_silent_worker_make_it_suspect_and_never_come_back_by_time() -> (
    None
):
    bench = pair()
    reach(bench, Phase.PREFILLING)
    bench.turn(cancelled("r"))
    for step in range(1, 4):
        bench.now_us = step * STALL_US
        bench.turn()
    assert bench.worker(P).is_suspect
    assert bench.draining(P) == [4, 2]
    assert RequestId("r") not in bench.core.fleet.requests


# --- Fencing ---


def fenced(commands: list[Command]) -> list[str]:
    return [command.worker for command in commands if isinstance(command, FenceWorker)]


def test_a_worker_that_stays_suspect_is_fenced_and_never_heard_again() -> None:
    bench = pair()
    reach(bench, Phase.PREFILLING)
    bench.now_us = STALL_US
    assert finished(bench.turn()).keys() == {"r"}
    assert bench.core.wake_us == STALL_US + FENCE_US
    bench.now_us = STALL_US + FENCE_US - 1
    assert fenced(bench.turn()) == []
    bench.now_us += 1
    assert fenced(bench.turn()) == ["p"]
    assert P not in bench.core.fleet.workers
    assert bench.turn(report(P, 1, chunks={0: 8})) == []
    assert bench.free(D) == list(COUNTS)
    bench.turn(joined(P, Role.PREFILL, COUNTS, incarnation=2))
    reach(bench, Phase.PREFILLING)


def test_some_answers_do_not_save_a_suspect_worker_but_all_of_them_do() -> None:
    for answers, is_fenced in (((1,), True), ((1, 2), False)):
        bench = CoreBench(joined(B, Role.BOTH, COUNTS))
        bench.turn(submitted("r", 8, 4))
        bench.now_us = STALL_US
        bench.turn()
        for completed in answers:
            bench.turn(report(B, completed))
        assert bench.worker(B).is_suspect is is_fenced
        bench.now_us += FENCE_US
        assert fenced(bench.turn()) == (["b"] if is_fenced else [])


@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING])
def test_requests_of_a_suspect_worker_begin_anew_where_they_fit(phase: Phase) -> None:
    bench = pair()
    bench.turn(joined(P2, Role.PREFILL, COUNTS), joined(D2, Role.DECODE, COUNTS))
    for worker in (P, D, P2, D2):
        bench.turn(report(worker, bench.worker(worker).seq))
    match phase:
        case Phase.PREFILLING:
            bench.turn(submitted("r", 8, 4))
        case Phase.HANDING_OFF:
            bench.prefill("r", 8, 4)
        case _:
            bench.prefill("r", 8, 4)
            request = bench.core.fleet.requests[RequestId("r")]
            assert request.ticket is not None and request.target is not None
            target = request.target.worker
            bench.turn(report(target.worker_id, target.seq, fetched={request.ticket: ""}))
    assert bench.phase("r") is phase
    request = bench.core.fleet.requests[RequestId("r")]
    stalled = (request.source if request.target is None else request.target).worker  # type: ignore[union-attr]
    for worker in {P, D, P2, D2} - {stalled.worker_id}:
        bench.turn(report(worker, bench.worker(worker).seq))
    bench.now_us = STALL_US
    bench.turn()
    assert stalled.is_suspect
    assert request.restart_count == 1 and bench.phase("r") is not Phase.FINISHED
    assert all(seat.worker is not stalled for seat in request.seats)
