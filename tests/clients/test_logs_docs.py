"""docs/LOGS.md is what people read logs by: it must not fall behind."""

import re
from pathlib import Path

from tidegate.ipc.log_events import LogEvent

TEXT = (Path(__file__).parents[2] / "docs" / "LOGS.md").read_text(encoding="utf-8")


def test_the_documents_tables_list_every_event_and_no_other() -> None:
    tables = TEXT[TEXT.index("## Events of a request") :]
    rows = re.findall(
        r"^\| `([a-z_]+)` \| (?:all|scheduler|worker|proxy|supervisor)", tables, re.M
    )
    assert sorted(rows) == sorted(event.value for event in LogEvent)
