"""What tests of the scheduler share."""

from pathlib import Path

import pytest

from tidegate.ipc.log import Log, configure


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return configure("scheduler", str(tmp_path / "log.jsonl"))
