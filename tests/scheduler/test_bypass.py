"""A request that waits for pages is passed by what fits, within bounds, and cannot starve."""

import pytest
from msgspec.structs import replace

from fakes.core_bench import (
    FULL_ONLY,
    SETTINGS,
    B,
    CoreBench,
    cancelled,
    joined,
    report,
    run,
    submitted,
)
from tidegate.ipc.log_events import LogEvent
from tidegate.ipc.protocol import Chunk, EndReason, RequestId, Role, Row, WaitKind
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.commands import AcceptRequest, SendPlan, StartRow
from tidegate.scheduler.fairness import DECODE_COST
from tidegate.scheduler.phases import Phase
from tidegate.scheduler.settings import CoreSettings
from tidegate.scheduler.waits import Explainer

SMALL = 4 + DECODE_COST  # What a request of 4 prompt tokens and one more may come to.


def crowded(settings: CoreSettings = SETTINGS, rows: int = 9, tenant: str = "") -> CoreBench:
    """Of ten pages six are taken by a request that runs, and "large" waits for seven."""
    bench = CoreBench(joined(B, Role.BOTH, (10,), FULL_ONLY, rows=rows), settings=settings)
    bench.turn(submitted("runs", 20, 5))
    for until in (8, 16, 20):
        tokens = {0: 1} if until == 20 else None
        bench.turn(report(B, bench.worker(B).seq, chunks={0: until}, tokens=tokens))
    assert bench.phase("runs") is Phase.DECODING
    bench.turn(submitted("large", 20, 5, tenant=tenant))
    assert bench.phase("large") is Phase.WAITING
    return bench


def small(bench: CoreBench, *names: str, tenant: str = "", priority: int = 0) -> list[str]:
    """Submit small requests; returns those that have begun."""
    bench.turn(*(submitted(n, 4, 1, tenant=tenant, priority=priority) for n in names))
    return [name for name in names if bench.phase(name) is Phase.PREFILLING]


def end(bench: CoreBench, name: str) -> None:
    """A small request is answered, and its pages come back."""
    row = bench.row_of(name)
    assert bench.worker(B).seats[row].chunk_until == 4
    done = {"chunks": {row: 4}, "tokens": {row: 1}, "ended": {row: EndReason.LENGTH}}
    bench.turn(report(B, bench.worker(B).seq, **done))  # type: ignore[arg-type] # By name.
    bench.turn(report(B, bench.worker(B).seq))


def passed(bench: CoreBench) -> list[tuple[str | None, object]]:
    return [
        (record.request_id, record.fields["passed"])
        for record in bench.records
        if record.event is LogEvent.REQUEST_ADMITTED and "passed" in record.fields
    ]


def test_the_plan_begins_what_passes_and_leaves_the_first_alone() -> None:
    bench = crowded()
    commands = bench.turn(submitted("s1", 4, 1))
    seq = bench.worker(B).seq
    start = StartRow(Row(1), RequestId("s1"), 0, 0, 4, (run(0, 6),))
    assert commands == [
        AcceptRequest(RequestId("s1"), 1),
        SendPlan(B, seq, (start, Chunk(Row(1), 4, sample=True))),
    ]


def test_what_fits_passes_a_request_that_waits_for_pages() -> None:
    bench = crowded()
    assert small(bench, "s1", "s2") == ["s1", "s2"]
    assert passed(bench) == [("s1", "large"), ("s2", "large")]
    assert bench.phase("large") is Phase.WAITING


def test_what_does_not_fit_passes_nobody() -> None:
    bench = crowded()
    bench.turn(submitted("as large", 20, 5), submitted("s1", 4, 1))
    assert bench.phase("as large") is Phase.WAITING
    assert passed(bench) == [("s1", "large")]


def test_so_many_pass_one_and_no_more() -> None:
    bench = crowded(replace(SETTINGS, bypass_count_max=2))
    assert small(bench, "s1", "s2", "s3") == ["s1", "s2"]
    end(bench, "s1")
    end(bench, "s2")
    assert bench.phase("s3") is Phase.WAITING
    # When it has begun, others may pass the next one that waits for pages.
    bench.turn(cancelled("runs"))
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.phase("large") is Phase.PREFILLING


def test_none_passes_if_that_is_switched_off() -> None:
    assert small(crowded(replace(SETTINGS, bypass_count_max=0)), "s1") == []
    assert small(crowded(replace(SETTINGS, bypass_tokens_max=0)), "s1") == []


def test_what_passes_one_may_come_to_so_much_together() -> None:
    bench = crowded(replace(SETTINGS, bypass_tokens_max=2 * SMALL))
    bench.turn(submitted("long", 4, 8))  # It may come to 36, and fits.
    assert bench.phase("long") is Phase.WAITING
    assert small(bench, "s1", "s2", "s3") == ["s1", "s2"]


def test_it_begins_as_soon_as_it_fits_whoever_waits_behind_it() -> None:
    """It cannot starve: when all have passed it that may, the pages that come free are its."""
    bench = crowded(replace(SETTINGS, bypass_count_max=3))
    names = [f"s{index}" for index in range(8)]
    begun = small(bench, *names)
    while begun:
        end(bench, begun.pop(0))
        begun += [n for n in names if bench.phase(n) is Phase.PREFILLING and n not in begun]
    assert len(passed(bench)) == 3
    row = bench.row_of("runs")
    bench.turn(report(B, bench.worker(B).seq, tokens={row: 4}, ended={row: EndReason.LENGTH}))
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.phase("large") is Phase.PREFILLING
    admitted = [r.request_id for r in bench.records if r.event is LogEvent.REQUEST_ADMITTED]
    assert admitted[:5] == ["runs", "s0", "s1", "s2", "large"]


def test_nobody_passes_a_request_that_waits_for_a_row() -> None:
    bench = CoreBench(joined(B, Role.BOTH, (50,), FULL_ONLY, rows=1))
    bench.turn(submitted("runs", 20, 5))
    bench.turn(submitted("waits", 20, 5), submitted("s1", 4, 1))
    assert bench.phase("s1") is Phase.WAITING


def test_nobody_passes_a_request_whose_pages_are_on_their_way() -> None:
    bench = crowded()
    bench.turn(cancelled("runs"), submitted("s1", 4, 1))
    assert bench.phase("s1") is Phase.WAITING
    bench.turn(report(B, bench.worker(B).seq))
    assert bench.phase("large") is Phase.PREFILLING and passed(bench) == []


def test_nobody_passes_a_request_that_gave_way() -> None:
    bench = CoreBench(
        joined(B, Role.BOTH, (7,), FULL_ONLY, rows=9),
        settings=CoreSettings(ahead_tokens=Tokens(1)),
    )
    bench.turn(submitted("a", 8, 16), submitted("r", 8, 16))
    bench.turn(report(B, 1, chunks={0: 8, 1: 8}, tokens={0: 1, 1: 1}))
    assert bench.phase("r") is Phase.DECODING
    while bench.phase("r") is Phase.DECODING:
        bench.turn(report(B, bench.worker(B).seq, tokens={0: 1, 1: 1}))
    bench.turn(report(B, bench.worker(B).seq))
    request = bench.core.fleet.requests[RequestId("r")]
    assert Explainer(bench.core.fleet).explain(request).kind is WaitKind.PAGES
    assert bench.worker(B).books.available(0) >= 1
    assert small(bench, "s1", "s2") == []


def test_a_lower_priority_passes_nobody() -> None:
    assert small(crowded(), "s1", priority=-1) == []


def test_a_tenant_that_is_too_far_ahead_passes_no_other() -> None:
    """With a quarter of the weight a request puts its tenant ahead by four times its cost."""
    settings = replace(SETTINGS, bypass_tokens_max=3 * SMALL)
    for weight, begins in ((1.0, ["s2"]), (0.25, [])):
        weighted = replace(settings, tenant_weights={"b": weight})
        bench = crowded(weighted, tenant="a")
        assert small(bench, "s1", tenant="b") == ["s1"]
        end(bench, "s1")
        assert small(bench, "s2", tenant="b") == begins
    assert small(bench, "s3", tenant="a") == ["s3"]  # Its own tenant is not ahead of itself.


def test_who_is_next_once_a_passing_one_has_been_charged_begins_in_the_same_plan() -> None:
    bench = crowded(replace(SETTINGS, bypass_tokens_max=SMALL))
    # It may come to more than may pass, so it has to wait for its turn.
    other = submitted("other", 1, 3, tenant="a")
    bench.turn(other, submitted("s1", 4, 1))
    assert passed(bench) == [("s1", "large")]
    assert bench.phase("large") is Phase.WAITING
    assert bench.phase("other") is Phase.PREFILLING


def test_who_is_passed_is_told_by_how_many() -> None:
    bench = crowded()
    large = bench.core.fleet.requests[RequestId("large")]
    assert "begun before it" not in Explainer(bench.core.fleet).explain(large).text
    small(bench, "s1")
    found = Explainer(bench.core.fleet).explain(large)
    assert (found.kind, found.passed) == (WaitKind.PAGES, 1)
    assert found.text.endswith("; 1 other behind it has begun before it")
    small(bench, "s2")
    found = Explainer(bench.core.fleet).explain(large)
    assert found.text.endswith("; 2 others behind it have begun before it")


@pytest.mark.parametrize("name", ["bypass_count_max", "bypass_tokens_max"])
def test_a_negative_bound_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must not be negative, got -1$"):
        replace(SETTINGS, **{name: -1})
