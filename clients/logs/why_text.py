"""What a request waited for, for a terminal."""

from tidegate.clients.logs.lines import count_words
from tidegate.clients.logs.why import Pass, Step, Stretch, WaitFields, Why
from tidegate.clients.logs.words import columns, count_text, time_text
from tidegate.ipc.log_events import LogEvent

WHERE = {"waiting": "queue", "handing_off": "hand-off", "decoding": "decode"}
RELEASED = {
    LogEvent.REQUEST_FINISHED.value: "ended",
    LogEvent.REQUEST_PREEMPTED.value: "gave way",
    LogEvent.DECODE_STARTED.value: "was handed over",
}


def render_why(why: Why) -> str:
    """Each wait with its time and length, what let the request go on, and how it ended."""
    start = why.start.replace(tzinfo=None).isoformat(sep=" ", timespec="milliseconds")
    waited = f"it waited {time_text(why.waited_us)} of {time_text(why.total_us)}"
    if not any(isinstance(row, Stretch) for row in why.rows):
        waited = "it never waited"
    parts = [
        f"request {why.request_id}, from {start} UTC: {waited}",
        "\n".join(_row_lines(why)),
        _end_text(why),
        count_words(why.counted),
    ]
    return "\n\n".join(part for part in parts if part)


def _row_lines(why: Why) -> list[str]:
    rows: list[tuple[str, str, str, str]] = []
    for row in why.rows:
        at = f"+{time_text(row.at_us)}"
        if isinstance(row, Pass):
            passes = f"> {row.request_id}, which fitted on {row.worker}, began before it"
            rows.append((at, "", "", passes))
            continue
        if isinstance(row, Step):
            first, *others = _step_lines(row)
            rows.append((at, "", "", first))
            rows += [("", "", "", other) for other in others]
            continue
        phase = WHERE.get(row.wait.phase, row.wait.phase)
        first, *others = _wait_lines(row.wait)
        rows.append((at, time_text(row.lasted_us), phase, first))
        rows += [("", "", "", other) for other in others]
    return columns([("at", "for", "in", "what it waited for"), *rows], (0, 1)) if rows else []


def _wait_lines(wait: WaitFields) -> list[str]:
    place = " ".join(part for part in (wait.role, "worker", wait.worker) if part)
    match wait.reason:
        case "turn":
            length = f" ({wait.queue_length:,} in the queue)" if wait.queue_length else ""
            return [f"its turn, behind {wait.first}{length}"]
        case "row":
            return [f"a row of {place}"]
        case "pages" | "draining":
            kind = "more page" if wait.reason == "pages" else "draining page"
            pages = f"{count_text(wait.pages_short, kind)} of the {wait.pool} pool"
            return [f"{pages} of {place}", *_page_lines(wait)]
        case "destination":
            prompts = count_text(wait.ahead, "finished prompt")
            return [f"{prompts} without a decode worker, of which {wait.first} is the first"]
        case _:
            return [wait.reason]


def _page_lines(wait: WaitFields) -> list[str]:
    counts = [
        f"{wait.pages_needed:,} needed",
        f"{wait.pages_available:,} available",
        *([f"{wait.pages_cached:,} cached"] if wait.pages_cached else []),
        *([f"{wait.pages_draining:,} draining"] if wait.pages_draining else []),
    ]
    names = [f"{name} ({count:,})" for name, count in wait.holders.items()]
    if wait.holders_left_out:
        names.append(count_text(wait.holders_left_out, "other"))
    held = [f"  held by {', '.join(names)}"] if names else []
    return ["  " + ", ".join(counts), *held]


def _step_lines(step: Step) -> list[str]:
    ahead = f", ahead of {step.ahead_of}, which waited for pages" if step.ahead_of else ""
    text = {
        LogEvent.REQUEST_ADMITTED.value: f"admitted on {step.worker}{ahead}",
        LogEvent.HANDOFF_STARTED.value: f"handed over to {step.worker}",
        LogEvent.REQUEST_GOES_ON.value: f"went on, on {step.worker}",
        LogEvent.REQUEST_PREEMPTED.value: f"gave way to {step.by} on {step.worker}, "
        f"which had no page of the {step.pool} pool",
    }[step.event]
    release = step.release
    if release is None:
        return [f"> {text}"]
    did = RELEASED[release.event] + (f" ({release.reason})" if release.reason else "")
    had = f"{release.request_id}, which had {count_text(release.pages, 'page')},"
    return [f"> {text}", f"  {had} {did} {time_text(release.before_us)} before"]


def _end_text(why: Why) -> str:
    text = f": {why.end_text}" if why.end_text else ""
    if why.end_event == LogEvent.REQUEST_REFUSED.value:
        return f"It was refused ({why.end_reason}){text}"
    if why.end_event:
        return f"It ended by {why.end_reason}{text}"
    if why.is_waiting:
        return "It waits still, as far as the log goes."
    return "It has not ended, as far as the log goes, and does not wait."
