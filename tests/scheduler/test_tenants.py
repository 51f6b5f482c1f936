"""Tenants before the core: whose request begins next, and what each is charged."""

from fakes.core_bench import (
    FULL_ONLY,
    B,
    CoreBench,
    D,
    P,
    cancelled,
    joined,
    lost,
    plan_of,
    report,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Chunk, EndReason, RequestId, Role
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import Command, StartRow
from tidegate.scheduler.fairness import DECODE_COST
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings


def one_row(settings: CoreSettings | None = None, pages: int = 50) -> CoreBench:
    return CoreBench(
        joined(B, Role.BOTH, (pages,), FULL_ONLY, rows=1),
        settings=settings or CoreSettings(chunk_tokens=Tokens(100)),
    )


def run_next(bench: CoreBench) -> str:
    """The only request that runs gets to its end with one token; returns its name."""
    (seat,) = bench.worker(B).seats.values()
    name = seat.request.request_id
    bench.turn(
        report(
            B,
            bench.worker(B).seq,
            chunks={0: seat.lengths.prompt},
            tokens={0: 1},
            ended={0: EndReason.END_TOKEN},
        )
    )
    bench.turn(report(B, bench.worker(B).seq))
    return name


def order(bench: CoreBench, count: int) -> str:
    return " ".join(run_next(bench) for _ in range(count))


def summaries(bench: CoreBench) -> dict[str, tuple[object, object]]:
    """Tenant, and tokens charged, of the requests that have ended."""
    return {
        str(record.request_id): (record.fields["tenant"], record.fields["charged_tokens"])
        for record in bench.records
        if record.event is LogEvent.REQUEST_FINISHED
    }


def test_two_tenants_take_turns_however_many_requests_one_of_them_sends() -> None:
    bench = one_row()
    bench.turn(
        *(submitted(f"a{index}", 10, 4, tenant="a") for index in range(10)),
        *(submitted(f"b{index}", 10, 4, tenant="b") for index in range(3)),
    )
    assert order(bench, 8) == "a0 b0 a1 b1 a2 b2 a3 a4"


def test_a_third_tenant_that_arrives_late_is_next_and_then_takes_its_turns() -> None:
    bench = one_row()
    for name in "ab":
        bench.turn(*(submitted(f"{name}{i}", 10, 4, tenant=name) for i in range(10)))
    assert order(bench, 6) == "a0 b0 a1 b1 a2 b2"
    bench.turn(*(submitted(f"c{index}", 10, 4, tenant="c") for index in range(10)))
    # One more was under way.
    assert order(bench, 7) == "a3 b3 c0 a4 b4 c1 a5"


def test_a_weight_is_a_share() -> None:
    settings = CoreSettings(chunk_tokens=Tokens(100), tenant_weights={"b": 2.0})
    bench = one_row(settings)
    bench.turn(
        *(
            submitted(f"{name}{index}", 10, 4, tenant=name)
            for index in range(9)
            for name in "ab"
        )
    )
    assert order(bench, 9) == "a0 b0 b1 a1 b2 b3 a2 b4 b5"


def test_short_prompts_are_worth_as_much_as_a_long_one() -> None:
    bench = one_row()
    bench.turn(
        *(submitted(f"a{index}", 90, 4, tenant="a") for index in range(3)),
        *(submitted(f"b{index}", 8, 4, tenant="b") for index in range(20)),
    )
    # A request of "a" is charged 94 tokens and one of "b" 12, with the token that it brings.
    assert order(bench, 10) == "a0 b0 b1 b2 b3 b4 b5 b6 b7 a1"


def test_tokens_count_while_their_request_goes_on() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=2))
    bench.turn(submitted("a0", 4, 40, tenant="a"), submitted("b0", 4, 4, tenant="b"))
    bench.turn(submitted("a1", 4, 4, tenant="a"), submitted("b1", 4, 4, tenant="b"))
    bench.turn(report(B, 1, chunks={0: 4, 1: 4}, tokens={0: 1, 1: 1}))
    for _ in range(12):
        bench.turn(report(B, bench.worker(B).seq, tokens={0: 1}))
    bench.turn(report(B, bench.worker(B).seq, tokens={1: 1}, ended={1: EndReason.END_TOKEN}))
    bench.turn(report(B, bench.worker(B).seq))
    # "a0" has had 12 tokens more, and "b0" has ended.
    assert bench.phase("b1") is Phase.PREFILLING and bench.phase("a1") is Phase.WAITING


def test_cached_tokens_are_free() -> None:
    bench = one_row()
    hashes = [bytes([index]) for index in range(10)]
    bench.turn(submitted("a0", 41, 1, tenant="a", hashes=hashes))
    run_next(bench)
    bench.turn(submitted("a1", 41, 1, tenant="a", hashes=hashes))
    run_next(bench)
    cost = DECODE_COST
    assert summaries(bench) == {"a0": ("a", 41 + cost), "a1": ("a", 1 + cost)}


def test_a_higher_priority_goes_before_any_share() -> None:
    bench = one_row()
    bench.turn(
        submitted("a0", 10, 4, tenant="a"),
        submitted("a1", 10, 4, tenant="a", priority=1),
        submitted("a2", 10, 4, tenant="a", priority=1),
        submitted("b0", 10, 4, tenant="b"),
    )
    assert order(bench, 4) == "a1 a2 a0 b0"


# --- Ranks ---


def chunked(commands: list[Command]) -> list[int]:
    return [op.row for op in plan_of(commands, B).operations if isinstance(op, Chunk)]


def started(commands: list[Command]) -> list[str]:
    return [op.request_id for op in plan_of(commands, B).operations if isinstance(op, StartRow)]


def test_rank_is_the_order_in_which_requests_begin_not_that_in_which_they_came() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=2))
    bench.turn(submitted("a0", 8, 9, tenant="a"), submitted("a1", 8, 9, tenant="a"))
    bench.turn(submitted("a2", 30, 9, tenant="a"), submitted("b0", 30, 9, tenant="b"))
    bench.turn(report(B, 1, chunks={0: 8}, tokens={0: 1}, ended={0: EndReason.END_TOKEN}))
    commands = bench.turn(report(B, 2, chunks={1: 8}, tokens={1: 1}))
    assert started(commands) == ["b0"]
    bench.turn(report(B, 3, ended={1: EndReason.END_TOKEN}))
    commands = bench.turn(report(B, bench.worker(B).seq, chunks={0: 8}))
    assert started(commands) == ["a2"]
    # What came first has begun last: the chunk is that of "b0".
    assert chunked(commands) == [bench.row_of("b0")]


def test_who_gives_way_goes_before_all_that_have_not_begun_and_keeps_its_rank() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (5,), FULL_ONLY, rows=2))
    bench.turn(submitted("a0", 4, 12, tenant="a"), submitted("a1", 4, 12, tenant="a"))
    bench.turn(submitted("b0", 4, 1, tenant="b"))
    bench.turn(report(B, bench.worker(B).seq, chunks={0: 4, 1: 4}, tokens={0: 1, 1: 1}))
    rank = bench.core.fleet.requests[RequestId("a1")].rank
    for _ in range(10):
        rows: dict[int, int] = {
            bench.row_of(n): 1 for n in ("a0", "a1") if bench.phase(n) is Phase.DECODING
        }
        if len(rows) < 2:
            break
        bench.turn(report(B, bench.worker(B).seq, tokens=rows))
    request = bench.core.fleet.requests[RequestId("a1")]
    assert request.phase is Phase.WAITING and request.preemption_count == 1
    assert bench.core.fleet.waiting.head() is request
    assert request.rank == rank
    # Its prompt and its tokens are to be computed again, and are not paid for till then.
    paid = DECODE_COST * request.output_count
    assert request.account.charged == paid - request.output_count
    bench.turn(cancelled("a0"))
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.phase("a1") is Phase.PREFILLING and request.rank == rank
    assert request.account.charged == 4 + paid


# --- What is charged ---


def test_a_request_is_charged_its_prompt_and_its_tokens() -> None:
    bench = CoreBench(
        joined(P, Role.PREFILL, (12,), FULL_ONLY), joined(D, Role.DECODE, (12,), FULL_ONLY)
    )
    bench.hand_over("r", 10, 6)
    row = bench.row_of("r")
    bench.turn(report(D, bench.worker(D).seq, tokens={row: 3}))
    bench.turn(cancelled("r", kept=1))
    # Tokens that were of no use to the client were sampled all the same.
    assert summaries(bench) == {"r": ("", 10 + 4 * DECODE_COST)}


def test_a_request_whose_worker_is_lost_pays_for_its_prompt_once() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (12,), FULL_ONLY), joined(D, Role.BOTH, (12,), FULL_ONLY)
    )
    bench.turn(submitted("r", 10, 6, tenant="t"))
    first = next(w for w in (B, D) if bench.worker(w).seats)
    other = D if first is B else B
    bench.turn(report(first, bench.worker(first).seq, chunks={0: 8}))
    bench.turn(lost(first))
    assert bench.phase("r") is Phase.PREFILLING
    until = 8
    while bench.phase("r") is Phase.PREFILLING:
        done = {0: 1} if until == 10 else None
        bench.turn(report(other, bench.worker(other).seq, chunks={0: until}, tokens=done))
        until = 10
    bench.turn(
        report(other, bench.worker(other).seq, tokens={0: 1}, ended={0: EndReason.STOP_ID})
    )
    assert summaries(bench) == {"r": ("t", 10 + 2 * DECODE_COST)}


def test_of_a_cancelled_prompt_only_the_chunks_that_were_given_out_are_charged() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (12,), FULL_ONLY))
    bench.turn(submitted("r", 30, 6))
    bench.turn(report(B, 1, chunks={0: 8}))
    bench.turn(cancelled("r"))
    assert summaries(bench) == {"r": ("", 16)}


def test_a_request_that_never_began_is_charged_nothing() -> None:
    bench = one_row()
    bench.turn(submitted("runs", 10, 4), submitted("waits", 10, 4))
    bench.turn(cancelled("waits"))
    assert summaries(bench) == {"waits": ("", 0)}
