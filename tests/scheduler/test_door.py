"""Who is let in, and what those hear who are not."""

import pytest

from fakes.core_bench import (
    FULL_ONLY,
    SETTINGS,
    STALL_US,
    B,
    CoreBench,
    D,
    P,
    hybrid,
    joined,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import RequestId, Role, WorkerId
from tidegate.kvcache.layout import Layout
from tidegate.scheduler.commands import AcceptRequest, Command, RefuseRequest
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings


def refusal(commands: list[Command]) -> RefuseRequest:
    (command,) = commands
    assert isinstance(command, RefuseRequest)
    return command


def limits(refused: RefuseRequest) -> tuple[int, str, int, int, str, str]:
    return (
        refused.status,
        refused.pool,
        refused.needed,
        refused.limit,
        refused.role,
        refused.worker,
    )


def is_accepted(bench: CoreBench, name: str, prompt: int, output: int | None) -> bool:
    return any(
        isinstance(c, AcceptRequest) for c in bench.turn(submitted(name, prompt, output))
    )


def pair(
    source: tuple[int, ...] = (8, 4), target: tuple[int, ...] = (8, 4), *, flag: bool = True
) -> CoreBench:
    layout = hybrid(flag=flag)
    return CoreBench(
        joined(P, Role.PREFILL, source, layout), joined(D, Role.DECODE, target, layout)
    )


def test_a_prompt_that_fills_the_full_pool_to_the_last_page_is_accepted() -> None:
    bench = pair()
    assert is_accepted(bench, "fits", 32, 1)
    refused = refusal(bench.turn(submitted("r", 33, 1)))
    assert limits(refused) == (400, "full", 9, 8, "prefill", "p")
    assert refused.code == "kv_pool_exceeded" and refused.retry_after_ms == 0
    assert "9 pages of the full pool" in refused.text and "p has 8" in refused.text
    assert bench.phase("r") is Phase.FINISHED


def test_prompt_and_output_together_are_measured_on_the_decode_worker() -> None:
    # The last token is sampled and never fed: 30 + 3 - 1 positions.
    assert is_accepted(pair((100, 4)), "fits", 30, 3)
    refused = refusal(pair((100, 4)).turn(submitted("r", 30, 4)))
    assert limits(refused) == (400, "full", 9, 8, "decode", "d")


def test_without_the_flag_the_window_pool_caps_the_prompt() -> None:
    assert is_accepted(pair((50, 5), (50, 5), flag=False), "fits", 20, 2)
    refused = refusal(pair((50, 5), (50, 5), flag=False).turn(submitted("r", 21, 2)))
    assert limits(refused)[:4] == (400, "window", 6, 5)
    # With it the window pool is no limit to any prompt.
    assert is_accepted(pair((50, 5), (50, 5)), "fits", 190, 2)


def test_without_the_flag_one_token_is_no_hand_off() -> None:
    assert is_accepted(pair((50, 5), (50, 5), flag=False), "fits", 190, 1)


def test_a_window_pool_below_the_floor_refuses_every_longer_prompt() -> None:
    # W 6 in pages of 4: ceil(5 / 4) + 1 = 3 pages.
    assert is_accepted(pair((50, 2), (50, 3)), "fits", 8, 20)
    refused = refusal(pair((50, 2), (50, 3)).turn(submitted("r", 9, 20)))
    assert limits(refused) == (400, "window", 3, 2, "prefill", "p")


@pytest.mark.parametrize("flag", [True, False])
def test_without_a_full_pool_the_flag_says_whether_the_window_pool_caps_a_prompt(
    flag: bool,
) -> None:
    layout = Layout(hybrid().groups[1:], flag)
    bench = CoreBench(
        joined(P, Role.PREFILL, (4,), layout), joined(D, Role.DECODE, (4,), layout)
    )
    # Four pages of four tokens, and a context of a thousand.
    assert is_accepted(bench, "as long as the pool", 16, 2)
    assert is_accepted(bench, "one token is no hand-off", 999, 1)
    if flag:
        assert is_accepted(bench, "long", 998, 2)
        refused = refusal(bench.turn(submitted("r", 999, 3)))
        assert limits(refused) == (400, "context", 1001, 1000, "", "")
    else:
        refused = refusal(bench.turn(submitted("r", 17, 2)))
        assert limits(refused) == (400, "window", 5, 4, "prefill", "p")
    assert bench.core.longest_prompt() == 1000


def test_a_refusal_for_a_pair_names_its_tighter_side() -> None:
    refused = refusal(pair((20, 4), (6, 4)).turn(submitted("r", 100, 2)))
    assert limits(refused) == (400, "full", 26, 6, "decode", "d")


def test_a_refusal_names_the_roomiest_of_the_choices() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (5,), FULL_ONLY),
        joined(D, Role.DECODE, (5,), FULL_ONLY),
        joined(B, Role.BOTH, (7,), FULL_ONLY),
        joined(WorkerId("b2"), Role.BOTH, (6,), FULL_ONLY),
    )
    assert is_accepted(bench, "fits", 27, 2)
    refused = refusal(bench.turn(submitted("r", 28, 2)))
    assert limits(refused) == (400, "full", 8, 7, "both", "b")


def test_a_large_prefill_worker_does_not_help_a_small_decode_worker() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (5,), FULL_ONLY),
        joined(WorkerId("p2"), Role.PREFILL, (50,), FULL_ONLY),
        joined(D, Role.DECODE, (8,), FULL_ONLY),
    )
    assert is_accepted(bench, "fits", 30, 3)
    assert bench.core.fleet.requests[RequestId("fits")].workers["prefill"] == "p2"
    assert limits(refusal(bench.turn(submitted("r", 40, 2))))[1:] == (
        "full",
        11,
        8,
        "decode",
        "d",
    )


def test_the_context_is_a_door() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, context=30))
    assert is_accepted(bench, "fits", 28, 3)
    refused = refusal(bench.turn(submitted("r", 28, 4)))
    assert refused.code == "context_length_exceeded"
    assert limits(refused) == (400, "context", 31, 30, "", "")


@pytest.mark.parametrize(("prompt", "output"), [(0, 4), (-1, 4), (4, 0), (4, -2), (0, None)])
def test_prompt_and_output_need_a_token_at_least(prompt: int, output: int | None) -> None:
    refused = refusal(pair().turn(submitted("r", prompt, output)))
    assert refused.status == 400
    assert ("prompt" if prompt < 1 else "max_tokens") in refused.text


def test_an_absent_max_tokens_becomes_the_largest_that_fits() -> None:
    # 8 pages hold 32 positions, and the last token takes none.
    assert AcceptRequest(RequestId("r"), 13) in pair().turn(submitted("r", 20, None))
    assert AcceptRequest(RequestId("r"), 2) in pair().turn(submitted("r", 31, None))


def test_an_absent_max_tokens_is_bounded_by_the_setting() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (50,), FULL_ONLY), settings=CoreSettings(default_max_tokens=7)
    )
    assert AcceptRequest(RequestId("r"), 7) in bench.turn(submitted("r", 20, None))


def test_an_absent_max_tokens_needs_room_for_two() -> None:
    refused = refusal(pair().turn(submitted("r", 32, None)))
    assert limits(refused)[:4] == (400, "full", 9, 8)
    bench = CoreBench(
        joined(B, Role.BOTH, (8,), FULL_ONLY), settings=CoreSettings(default_max_tokens=1)
    )
    assert is_accepted(bench, "one", 32, None)


def test_without_a_worker_the_answer_is_503() -> None:
    refused = refusal(CoreBench().turn(submitted("r", 4, 4)))
    assert (refused.status, refused.code) == (503, "no_worker")
    assert refused.retry_after_ms == SETTINGS.retry_after_ms


@pytest.mark.parametrize(
    ("present", "missing"), [(Role.PREFILL, "decode"), (Role.DECODE, "prefill")]
)
def test_without_a_role_that_is_needed_the_answer_is_503(present: Role, missing: str) -> None:
    bench = CoreBench(joined(WorkerId("w"), present, (8, 4)))
    refused = refusal(bench.turn(submitted("r", 4, 4)))
    assert (refused.status, refused.role) == (503, missing)


def test_one_token_needs_no_decode_worker() -> None:
    assert is_accepted(CoreBench(joined(P, Role.PREFILL, (8, 4))), "r", 4, 1)
    refused = refusal(CoreBench(joined(D, Role.DECODE, (8, 4))).turn(submitted("r", 4, 1)))
    assert (refused.status, refused.role) == (503, "prefill")


def test_a_full_queue_answers_503_at_once_and_takes_more_when_it_has_room() -> None:
    settings = CoreSettings(waiting_count_max=2)
    bench = CoreBench(joined(B, Role.BOTH, (8,), FULL_ONLY, rows=1), settings=settings)
    bench.turn(submitted("runs", 4, 4))
    bench.turn(submitted("w1", 4, 4))
    bench.turn(submitted("w2", 4, 4))
    refused = refusal(bench.turn(submitted("r", 4, 4)))
    assert (refused.status, refused.code) == (503, "queue_full")
    assert refused.retry_after_ms == settings.retry_after_ms
    # What can never run is told so even now: to come back later would not help.
    assert refusal(bench.turn(submitted("large", 400, 4))).status == 400
    bench.turn(report(B, 1, chunks={0: 4}, tokens={0: 1}))
    bench.core.apply(submitted("early", 4, 4), 0)
    assert refusal([c for c in bench.turn() if isinstance(c, RefuseRequest)]).status == 503


def test_a_refused_request_leaves_nothing_behind() -> None:
    bench = pair()
    bench.turn(submitted("r", 400, 1))
    assert bench.core.is_idle and bench.core.wake_us is None
    assert not bench.core.fleet.by_client
    (record,) = [r for r in bench.records if r.event is LogEvent.REQUEST_REFUSED]
    assert (record.fields["pool"], record.fields["needed"], record.fields["limit"]) == (
        "full",
        100,
        8,
    )


def test_what_only_a_stalled_worker_could_run_is_told_to_come_back() -> None:
    small, large = WorkerId("small"), WorkerId("large")
    bench = CoreBench(
        joined(small, Role.BOTH, (4,), FULL_ONLY), joined(large, Role.BOTH, (20,), FULL_ONLY)
    )
    bench.turn(submitted("stalls", 40, 4))
    bench.now_us = STALL_US
    bench.turn()
    refused = refusal(bench.turn(submitted("r", 40, 4)))
    assert (refused.status, refused.retry_after_ms) == (503, SETTINGS.retry_after_ms)
    assert refusal(bench.turn(submitted("never", 400, 4))).status == 400
    assert is_accepted(bench, "fits", 8, 4)


def test_the_longest_prompt_is_the_longest_that_is_accepted() -> None:
    bench = pair()
    longest = bench.core.longest_prompt()
    assert longest == 32
    assert is_accepted(bench, "fits", longest, 1)
    assert refusal(bench.turn(submitted("r", longest + 1, 1))).status == 400
    assert CoreBench().core.longest_prompt() == 0
