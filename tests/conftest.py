"""Leaves out what this machine or this run cannot do, and says how many tests that were."""

import os

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more of a shared machine than of the code. Where the
# environment says CI, Hypothesis has a profile of its own that is as patient.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
if "CI" not in os.environ:
    settings.load_profile("patient")

LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `slow` tests unless `-m` names them, and `cuda` tests without a GPU."""
    for marker, reason in _reasons(config, items).items():
        chosen = [item for item in items if item.get_closest_marker(marker) is not None]
        if chosen:
            config.stash[LEFT_OUT][f"{marker} ({reason})"] = len(chosen)
            config.hook.pytest_deselected(items=chosen)
            items[:] = [item for item in items if item not in chosen]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for what, count in config.stash[LEFT_OUT].items():
        terminalreporter.write_line(f"left out: {count} tests marked {what}")


def _reasons(config: pytest.Config, items: list[pytest.Item]) -> dict[str, str]:
    """The markers whose tests are left out, and why."""
    reasons: dict[str, str] = {}
    if "slow" not in config.option.markexpr:
        reasons["slow"] = "run them with -m slow"
    if any(item.get_closest_marker("cuda") is not None for item in items):
        import torch  # Not for runs that need no model: it takes a second.

        if not torch.cuda.is_available():
            reasons["cuda"] = "no GPU"
    return reasons
