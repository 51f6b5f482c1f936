"""A request's story for a terminal."""

from collections.abc import Mapping
from typing import cast

from tidegate.clients.logs.lines import count_words
from tidegate.clients.logs.story import Story, StoryLine
from tidegate.clients.logs.words import bytes_text, columns, count_text, time_text
from tidegate.ipc.log_events import LogEvent

VALUE_CHARS_MAX = 120


def render_story(story: Story) -> str:
    """The events with the time of each, and then what the request took in each phase."""
    start = story.start.replace(tzinfo=None).isoformat(sep=" ", timespec="milliseconds")
    parts = [
        f"request {story.request_id}, from {start} UTC",
        "\n".join(_event_lines(story)),
        "\n".join(_end_lines(story.end)),
        count_words(story.counted),
    ]
    return "\n\n".join(parts)


def _event_lines(story: Story) -> list[str]:
    rows = [
        (f"+{time_text(line.at_us)}", line.process, line.event, _fields_text(line))
        for line in story.lines
    ]
    return columns(rows, right=(0,))


def _fields_text(line: StoryLine) -> str:
    # The line that sums up is retold below, in words.
    if line.event == LogEvent.REQUEST_FINISHED.value:
        return f"reason={line.fields.get('reason')}"
    return " ".join(
        f"{name}={_cut(value)}"
        for name, value in line.fields.items()
        if value not in (None, "", {})
    )


def _cut(value: object) -> str:
    text = str(value)
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        text = ",".join(f"{name}:{each}" for name, each in pairs)
    if len(text) > VALUE_CHARS_MAX:
        text = text[:VALUE_CHARS_MAX] + "…"
    return f'"{text}"' if " " in text else text


def _end_lines(end: StoryLine | None) -> list[str]:
    if end is None:
        return ["It has not ended, as far as the log goes."]
    fields = end.fields
    if end.event == LogEvent.REQUEST_REFUSED.value:
        lines = [
            f"Refused with {fields.get('status')} {fields.get('code')}: {fields.get('text')}"
        ]
        if fields.get("pool"):
            unit = "token" if fields.get("pool") == "context" else "page"
            needed, limit = _count(fields, "needed"), _count(fields, "limit")
            lines.append(
                f"It needs {count_text(needed, unit)} of the {fields.get('pool')} pool; "
                f"the limit is {limit:,}."
            )
        return lines
    text = f": {fields.get('text')}" if fields.get("text") else ""
    return [f"Ended by {fields.get('reason')}{text}", "", *columns(_facts(fields), right=(1,))]


def _facts(fields: Mapping[str, object]) -> list[tuple[str, str, str]]:
    outputs = _count(fields, "output_tokens")
    prompt = count_text(_count(fields, "prompt_tokens"), "prompt token")
    decode_note = count_text(outputs, "token")
    decode_us = fields.get("decode_us")
    if outputs > 1 and isinstance(decode_us, int):
        decode_note += f", {time_text(decode_us // (outputs - 1))} each"
    moved = (
        f"{bytes_text(_count(fields, 'bytes_moved'))} moved, "
        f"{bytes_text(_count(fields, 'bytes_saved'))} saved"
        if _count(fields, "bytes_moved")
        else "no pages moved"
    )
    rows = [
        _time_row(fields, "queue", "queue_us", ""),
        _time_row(fields, "prefill", "prefill_us", f"{prompt} on {_worker(fields, 'prefill')}"),
        _time_row(fields, "hand-off", "handoff_us", moved),
        _time_row(
            fields, "decode", "decode_us", f"{decode_note} on {_worker(fields, 'decode')}"
        ),
        _time_row(fields, "first token", "ttft_us", "after it was received"),
        _time_row(fields, "in all", "total_us", ""),
    ]
    peaks = [
        f"{name.removeprefix('pages_').removesuffix('_peak')} {value:,}"
        for name, value in fields.items()
        if name.startswith("pages_") and name.endswith("_peak") and isinstance(value, int)
    ]
    if peaks:
        rows.append(("  pages at most", "", ", ".join(peaks)))
    return [row for row in rows if row is not None]


def _time_row(
    fields: Mapping[str, object], words: str, name: str, note: str
) -> tuple[str, str, str] | None:
    """None for a phase that the request did not reach."""
    value = fields.get(name)
    if not isinstance(value, int):
        return None
    return (f"  {words}", time_text(value), note)


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0


def _worker(fields: Mapping[str, object], leg: str) -> str:
    return str(fields.get(f"{leg}_worker") or fields.get("prefill_worker") or "no worker")
