"""Settings of the core are checked when they are made."""

import pytest
from msgspec.structs import replace

from tidegate.kvcache.demand import Pace
from tidegate.kvcache.layout import Tokens
from tidegate.scheduler.settings import CoreSettings

AT_LEAST_ONE = [
    "chunk_tokens",
    "ahead_tokens",
    "default_max_tokens",
    "waiting_count_max",
    "handoff_waiting_count_max",
    "queue_timeout_us",
    "stall_timeout_us",
]


@pytest.mark.parametrize("name", AT_LEAST_ONE)
@pytest.mark.parametrize("value", [0, -1])
def test_zero_would_be_a_deadlock_and_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got {value}$"):
        replace(CoreSettings(), **{name: value})
    assert getattr(replace(CoreSettings(), **{name: 1}), name) == 1


def test_a_negative_retry_after_is_refused() -> None:
    with pytest.raises(ValueError, match="retry_after_ms must not be negative"):
        CoreSettings(retry_after_ms=-1)
    assert CoreSettings(retry_after_ms=0).retry_after_ms == 0


def test_no_chunk_budget_is_a_setting_of_its_own() -> None:
    settings = CoreSettings(chunk_tokens=None, ahead_tokens=Tokens(7))
    assert settings.pace == Pace(None, 1, Tokens(7))
