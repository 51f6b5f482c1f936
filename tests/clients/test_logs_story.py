"""`tidegate logs story` over logs made here."""

from pathlib import Path

import msgspec
import pytest

from tidegate.clients.logs.story import NoSuchRequest, tell
from tidegate.clients.logs.story_text import render_story


def line(at_us: int, process: str, event: str, request_id: str, **fields: object) -> bytes:
    seconds, rest = divmod(at_us, 1_000_000)
    return (
        msgspec.json.encode(
            {
                "time": f"2026-01-02T03:04:{seconds:02}.{rest:06}Z",
                "level": "info",
                "process": process,
                "pid": 7,
                "event": event,
                "request_id": request_id,
            }
            | fields
        )
        + b"\n"
    )


FINISHED: dict[str, object] = {
    "reason": "length",
    "phase": "decoding",
    "text": "",
    "prompt_tokens": 1200,
    "max_tokens": 5,
    "output_tokens": 5,
    "queue_us": 500,
    "prefill_us": 700_000,
    "handoff_us": 2_000,
    "decode_us": 40_000,
    "total_us": 742_500,
    "ttft_us": 700_500,
    "bytes_moved": 2048,
    "bytes_saved": 4096,
    "pages_full_peak": 76,
    "pages_window_peak": 65,
    "prefill_worker": "prefill-0",
    "decode_worker": "decode-0",
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b"".join(
            [
                line(
                    1_000_000,
                    "scheduler",
                    "request_received",
                    "e1-1",
                    client_request_id="mine",
                    max_tokens=None,
                ),
                line(1_000_100, "scheduler", "request_received", "e1-12", client="c2"),
                line(1_000_500, "scheduler", "request_accepted", "e1-1", prompt_tokens=1200),
                b"not ours, though it names e1-1\n",
                line(
                    1_742_900,
                    "proxy",
                    "http_request",
                    "e1-1",
                    http_id="0123456789abcdef",
                    status=200,
                ),
                line(1_742_500, "scheduler", "request_finished", "e1-1", **FINISHED),
                # Written late by another process, and yet earlier in time.
                line(1_000_900, "prefill-0", "row_started", "e1-1", row=0),
                line(
                    2_000_000,
                    "scheduler",
                    "request_refused",
                    "e1-2",
                    status=400,
                    code="kv_pool_exceeded",
                    text="it needs 120 pages",
                    pool="full",
                    needed=120,
                    limit=64,
                ),
            ]
        )
    )
    return path


def test_a_story_has_all_lines_of_one_request_in_order_of_time(log: Path) -> None:
    story = tell(log, "e1-1")
    assert [(one.at_us, one.process, one.event) for one in story.lines] == [
        (0, "scheduler", "request_received"),
        (500, "scheduler", "request_accepted"),
        (900, "prefill-0", "row_started"),
        (742_500, "scheduler", "request_finished"),
        (742_900, "proxy", "http_request"),
    ]
    assert story.counted.foreign == 1


@pytest.mark.parametrize(
    "name",
    [
        "e1-1",
        "mine",
        "mi",
        "0123456789abcdef",
        "01234",
        "cmpl-0123456789abcdef-e1-1",
        "chatcmpl-0123456789abcdef-e1-1",
        "cmpl-0123",
    ],
)
def test_a_request_is_found_by_its_ids_and_their_beginnings(log: Path, name: str) -> None:
    assert tell(log, name).request_id == "e1-1"


def test_an_id_in_full_goes_before_a_beginning(log: Path) -> None:
    assert tell(log, "e1-1").request_id == "e1-1"
    assert tell(log, "e1-12").request_id == "e1-12"


def test_an_ambiguous_beginning_lists_the_requests(log: Path) -> None:
    with pytest.raises(NoSuchRequest, match="any of 3 requests: e1-1, e1-12, e1-2"):
        tell(log, "e1-")


@pytest.mark.parametrize("name", ["e9", "length", "ine", "", '"', "\\", "cmpl-"])
def test_a_name_that_means_nothing_is_an_error(log: Path, name: str) -> None:
    with pytest.raises(NoSuchRequest):
        tell(log, name)


def test_the_text_tells_phases_pages_and_bytes(log: Path) -> None:
    text = render_story(tell(log, "e1-1"))
    assert text == (
        "request e1-1, from 2026-01-02 03:04:01.000 UTC\n"
        "\n"
        "    +0 us  scheduler  request_received  client_request_id=mine\n"
        "  +500 us  scheduler  request_accepted  prompt_tokens=1200\n"
        "  +900 us  prefill-0  row_started       row=0\n"
        "+742.5 ms  scheduler  request_finished  reason=length\n"
        "+742.9 ms  proxy      http_request      http_id=0123456789abcdef status=200\n"
        "\n"
        "Ended by length\n"
        "\n"
        "  queue            500 us\n"
        "  prefill        700.0 ms  1,200 prompt tokens on prefill-0\n"
        "  hand-off         2.0 ms  2.0 KiB moved, 4.0 KiB saved\n"
        "  decode          40.0 ms  5 tokens, 10.0 ms each on decode-0\n"
        "  first token    700.5 ms  after it was received\n"
        "  in all         742.5 ms\n"
        "  pages at most            full 76, window 65\n"
        "\n"
        "8 lines read; 1 cut or not of tidegate, and skipped"
    )


def test_a_wait_tells_who_holds_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    wait = {"reason": "pages", "pages_short": 3}
    path.write_bytes(
        line(0, "scheduler", "request_waits", "e-1", **wait, holders={"e-2": 12, "e-3": 4})
        + line(9, "scheduler", "request_waits", "e-1", **wait, holders={})
    )
    text = render_story(tell(path, "e-1"))
    assert "reason=pages pages_short=3 holders=e-2:12,e-3:4\n" in text
    assert "reason=pages pages_short=3\n" in text


def test_a_refusal_tells_pool_need_and_limit(log: Path) -> None:
    text = render_story(tell(log, "e1-2"))
    assert "Refused with 400 kv_pool_exceeded: it needs 120 pages" in text
    assert "It needs 120 pages of the full pool; the limit is 64." in text


def test_a_running_request_has_no_end(log: Path) -> None:
    story = tell(log, "e1-12")
    assert story.end is None
    assert "has not ended" in render_story(story)
