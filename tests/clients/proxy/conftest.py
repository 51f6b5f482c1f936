"""A proxy in front of the fake scheduler."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fakes.fake_scheduler import FakeScheduler
from fakes.running_proxy import RunningProxy, open_proxy


@pytest.fixture
async def proxy(scheduler: FakeScheduler, tmp_path: Path) -> AsyncGenerator[RunningProxy]:
    async with open_proxy(scheduler, tmp_path / "log") as proxy:
        yield proxy
