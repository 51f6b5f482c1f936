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
    "waiting_tokens_max",
    "tenant_waiting_count_max",
    "tenant_waiting_tokens_max",
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
    assert settings.pace == Pace(None, 2, Tokens(7))


def test_the_longest_time_to_come_back_is_not_less_than_the_shortest() -> None:
    with pytest.raises(
        ValueError, match=r"^retry_after_ms_max must be at least .*\(9\), got 8$"
    ):
        CoreSettings(retry_after_ms=9, retry_after_ms_max=8)


@pytest.mark.parametrize("weight", [0, -1.0, 1e7, float("nan")])
def test_a_weight_that_is_no_share_is_refused_with_the_tenants_name(weight: float) -> None:
    with pytest.raises(ValueError, match=r"^tenant_weights: the weight of 'a' must be"):
        CoreSettings(tenant_weights={"a": weight})
