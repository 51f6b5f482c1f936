"""`tidegate logs why` over logs made here."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tidegate.clients.logs.lines import LogFileError
from tidegate.clients.logs.story import NoSuchRequest
from tidegate.clients.logs.why import Pass, Release, Step, Stretch, WaitFields, Why, find_why
from tidegate.clients.logs.why_text import render_why

Fields = dict[str, object]
PAGES: Fields = {
    "phase": "waiting",
    "reason": "pages",
    "role": "prefill",
    "worker": "prefill-0",
    "pool": "window",
    "pages_short": 30,
    "pages_needed": 64,
    "pages_available": 34,
    "pages_draining": 2,
    "pages_cached": 4,
    "holders": {"e-1": 40, "e-2": 12},
    "holders_left_out": 3,
}
NOBODY: Fields = {}
DRAINING: Fields = PAGES | {"reason": "draining", "holders": NOBODY}
STARVES: Fields = {
    "phase": "decoding",
    "reason": "draining",
    "role": "decode",
    "worker": "decode-1",
    "pool": "full",
    "pages_short": 1,
    "pages_needed": 1,
    "pages_draining": 8,
    "holders": {"e-9": 5},
}


def line(at_us: int, event: str, request_id: str | None, **fields: object) -> bytes:
    seconds, rest = divmod(at_us, 1_000_000)
    head = {
        "time": f"2026-01-02T03:04:{seconds:02}.{rest:06}Z",
        "level": "info",
        "process": "scheduler",
        "pid": 7,
        "event": event,
        "request_id": request_id,
    }
    return msgspec.json.encode(head | fields) + b"\n"


@pytest.fixture
def why_of(tmp_path: Path) -> Callable[..., Why]:
    def read(*lines: bytes, name: str = "e-9") -> Why:
        path = tmp_path / "log.jsonl"
        path.write_bytes(b"".join(lines))
        return find_why(path, name)

    return read


RECEIVED = line(0, "request_received", "e-9", client_request_id="mine")
STORY = (
    RECEIVED,
    line(500, "request_accepted", "e-9"),
    line(
        600, "request_waits", "e-9", phase="waiting", reason="turn", first="e-7", queue_length=4
    ),
    line(900_000, "request_admitted", "e-7", worker="prefill-0"),
    line(1_000_600, "request_waits", "e-9", **PAGES),
    # Who holds nothing of the pool, who is too early, and who is too late let nothing go here.
    line(900, "request_finished", "e-2", reason="length"),
    line(1_200_000, "request_finished", "e-5", reason="length"),
    line(1_900_000, "decode_started", "e-2", worker="decode-0"),
    line(2_000_000, "request_finished", "e-1", reason="end_token"),
    line(2_000_100, "request_waits", "e-9", **DRAINING),
    line(2_100_100, "request_admitted", "e-9", worker="prefill-0"),
    line(2_200_000, "request_finished", "e-2", reason="length"),
    line(3_000_000, "handoff_started", "e-9", source="prefill-0", target="decode-1"),
    line(4_000_000, "request_waits", "e-9", **STARVES),
    line(4_010_000, "request_goes_on", "e-9", worker="decode-1"),
    line(5_000_000, "request_preempted", "e-9", worker="decode-1", by="e-8", pool="full"),
    line(
        5_000_010,
        "request_waits",
        "e-9",
        phase="waiting",
        reason="row",
        role="prefill",
        worker="p",
    ),
    line(6_000_010, "request_finished", "e-9", reason="timeout", text="it waited 1 s"),
    line(9_000_000, "request_accepted", "e-10"),
)


RENDERED = """
request e-9, from 2026-01-02 03:04:00.000 UTC: it waited 3.11 s of 6.00 s

     at       for  in      what it waited for
+600 us    1.00 s  queue   its turn, behind e-7 (4 in the queue)
+1.00 s  999.5 ms  queue   30 more pages of the window pool of prefill worker prefill-0
                             64 needed, 34 available, 4 cached, 2 draining
                             held by e-1 (40), e-2 (12), 3 others
+2.00 s  100.0 ms  queue   30 draining pages of the window pool of prefill worker prefill-0
                             64 needed, 34 available, 4 cached, 2 draining
                             held by 3 others
+2.10 s                    > admitted on prefill-0
                             e-1, which had 40 pages, ended (end_token) 100.1 ms before
+3.00 s                    > handed over to decode-1
+4.00 s   10.0 ms  decode  1 draining page of the full pool of decode worker decode-1
                             1 needed, 0 available, 8 draining
                             held by e-9 (5)
+4.01 s                    > went on, on decode-1
+5.00 s                    > gave way to e-8 on decode-1, which had no page of the full pool
+5.00 s    1.00 s  queue   a row of prefill worker p

It ended by timeout: it waited 1 s

19 lines read
"""


def test_each_wait_lasts_until_the_next_or_until_the_request_goes_on(
    why_of: Callable[..., Why],
) -> None:
    why = why_of(*STORY)
    rows = [
        (row.at_us, row.lasted_us, row.wait.reason) if isinstance(row, Stretch) else row.event
        for row in why.rows
        if not isinstance(row, Pass)
    ]
    assert rows == [
        (600, 1_000_000, "turn"),
        (1_000_600, 999_500, "pages"),
        (2_000_100, 100_000, "draining"),
        "request_admitted",
        "handoff_started",
        (4_000_000, 10_000, "draining"),
        "request_goes_on",
        "request_preempted",
        (5_000_010, 1_000_000, "row"),
    ]
    assert why.waited_us == 1_000_000 + 999_500 + 100_000 + 10_000 + 1_000_000
    assert why.total_us == 6_000_010
    assert (why.is_waiting, why.end_event) == (False, "request_finished")
    assert (why.end_reason, why.end_text) == ("timeout", "it waited 1 s")


def test_a_wait_has_what_the_log_says_of_it(why_of: Callable[..., Why]) -> None:
    waits = [row.wait for row in why_of(*STORY).rows if isinstance(row, Stretch)]
    assert waits[0] == WaitFields("turn", "waiting", first="e-7", queue_length=4)
    assert waits[1] == msgspec.convert(PAGES, WaitFields)
    assert (waits[1].pool, waits[1].pages_short) == ("window", 30)
    assert waits[1].holders == {"e-1": 40, "e-2": 12}


def test_the_last_holder_that_let_pages_go_is_told(why_of: Callable[..., Why]) -> None:
    steps = [row for row in why_of(*STORY).rows if isinstance(row, Step)]
    release = Release("e-1", 40, "request_finished", "end_token", 100_100)
    assert steps[0] == Step(2_100_100, "request_admitted", "prefill-0", release=release)
    assert steps[1] == Step(3_000_000, "handoff_started", "decode-1")
    assert steps[3] == Step(5_000_000, "request_preempted", "decode-1", "e-8", "full")


@pytest.mark.parametrize(
    ("event", "did"), [("request_preempted", "gave way"), ("decode_started", "was handed over")]
)
def test_holders_let_pages_go_in_other_ways_too(
    why_of: Callable[..., Why], event: str, did: str
) -> None:
    why = why_of(
        RECEIVED,
        line(1_000, "request_waits", "e-9", **PAGES),
        line(2_000, event, "e-2", worker="w"),
        line(2_500, "request_admitted", "e-9", worker="prefill-0"),
    )
    assert f"e-2, which had 12 pages, {did} 500 us before" in render_why(why)


def test_a_request_that_waits_when_the_log_ends_waits_still(why_of: Callable[..., Why]) -> None:
    why = why_of(
        RECEIVED,
        line(1_000, "request_waits", "e-9", **PAGES),
        line(7_001_000, "chunk_done", "e-1"),
        b"another program's line\n",
        b'{"time": "2026-01-02T03:04:59',
    )
    assert (why.is_waiting, why.end_event, why.waited_us) == (True, "", 7_000_000)
    assert "It waits still, as far as the log goes." in render_why(why)


def test_a_request_that_runs_does_not_wait(why_of: Callable[..., Why]) -> None:
    why = why_of(RECEIVED, line(700, "request_admitted", "e-9", worker="prefill-0"))
    assert (why.is_waiting, why.waited_us, why.total_us) == (False, 0, 700)
    assert render_why(why) == (
        "request e-9, from 2026-01-02 03:04:00.000 UTC: it never waited\n"
        "\n"
        "     at  for  in  what it waited for\n"
        "+700 us           > admitted on prefill-0\n"
        "\n"
        "It has not ended, as far as the log goes, and does not wait.\n"
        "\n"
        "2 lines read"
    )


def test_a_refused_request_says_why(why_of: Callable[..., Why]) -> None:
    refusal = {"status": 400, "code": "kv_pool_exceeded", "text": "it needs 120 pages"}
    text = render_why(why_of(RECEIVED, line(400, "request_refused", "e-9", **refusal)))
    assert "it never waited" in text
    assert "It was refused (kv_pool_exceeded): it needs 120 pages" in text


def test_the_text_tells_pool_pages_and_holders(why_of: Callable[..., Why]) -> None:
    assert render_why(why_of(*STORY)) == RENDERED.strip()


def test_a_line_that_does_not_say_what_is_waited_for_is_left_out(
    why_of: Callable[..., Why],
) -> None:
    why = why_of(
        RECEIVED,
        line(1_000, "request_waits", "e-9"),
        line(2_000, "request_waits", "e-9", reason="row", holders=["no mapping"]),
        line(3_000, "request_waits", "e-9", reason="comet", phase="space"),
        line(4_000, "request_admitted", "e-9"),
    )
    (wait, _) = why.rows
    assert isinstance(wait, Stretch) and wait.lasted_us == 1_000
    assert "space  comet" in render_why(why)


def test_a_request_is_found_by_the_names_of_its_story(why_of: Callable[..., Why]) -> None:
    assert why_of(*STORY, name="mine").request_id == "e-9"
    with pytest.raises(NoSuchRequest, match="any of 6 requests"):
        why_of(*STORY, name="e-")
    with pytest.raises(NoSuchRequest, match="no request in"):
        why_of(*STORY, name="e-99")


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogFileError, match="No such file"):
        find_why(tmp_path / "none", "e-9")


def test_those_that_went_ahead_while_it_waited_for_pages_are_told(
    why_of: Callable[..., Why],
) -> None:
    lines = (
        RECEIVED,
        line(100, "request_waits", "e-9", **PAGES),
        line(400, "request_admitted", "e-3", worker="prefill-0", passed="e-99"),
        line(500, "request_admitted", "e-4", worker="prefill-1", passed="e-9"),
        line(2_000, "request_admitted", "e-5", worker="prefill-0", passed="e-9"),
    )
    why = why_of(*lines)
    assert isinstance(why.rows[0], Stretch)
    assert why.rows[1:] == (Pass(500, "e-4", "prefill-1"), Pass(2_000, "e-5", "prefill-0"))
    assert why.is_waiting and why.waited_us == 1_900
    text = render_why(why)
    assert "+500 us                 > e-4, which fitted on prefill-1, began before it" in text
    assert "It waits still" in text


def test_who_went_ahead_is_told_of_whom(why_of: Callable[..., Why]) -> None:
    why = why_of(RECEIVED, line(400, "request_admitted", "e-9", worker="p", passed="e-1"))
    (step,) = why.rows
    assert isinstance(step, Step) and step.ahead_of == "e-1"
    assert "> admitted on p, ahead of e-1, which waited for pages" in render_why(why)
