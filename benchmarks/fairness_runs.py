"""One run of tenants with backlogs: its figures, and how they come from a simulation."""

from collections.abc import Mapping, Sequence

import msgspec

from simulation.tenants import Send, TenantRun

BUSY_COUNT, CALM_COUNT, LATE_COUNT = 600, 60, 15  # Requests.
LATE_US = 1_000_000


class Fairness(msgspec.Struct, frozen=True):
    """`served` is what each tenant was given while the first two had requests waiting."""

    served: Mapping[str, float]
    difference: float
    bound: float
    late_begun_before: int
    late_wait_s: float
    late_share: float


def difference_of(services: Sequence[Mapping[str, float]]) -> float:
    """The greatest difference between busy and calm over any stretch of a time, of which
    `services` has what each was given until each of its moments."""
    gaps = [served["busy"] - served["calm"] for served in services]
    return max(gaps) - min(gaps)


def share_of(tenant: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The tenant's part of what all were given between two moments."""
    given = {name: after[name] - before[name] for name in after}
    return given[tenant] / sum(given.values())


def simulated(seed: int, *, are_apart: bool) -> Fairness:
    """A prefill and a decode worker with four rows, in virtual time."""
    sends = (
        Send("busy", BUSY_COUNT),
        Send("calm", CALM_COUNT),
        Send("late", LATE_COUNT, LATE_US),
    )
    run = TenantRun(sends, seed, are_apart=are_apart)
    last = min(run.places(tenant)[-1] for tenant in ("busy", "calm"))
    arrived = next(i for i, one in enumerate(run.begun) if one.at_us >= LATE_US)
    late = run.places("late")
    services = [one.served for one in run.begun]
    fair = run if are_apart else TenantRun(sends, seed)
    return Fairness(
        run.served(0, last),
        difference_of(services[: last + 1]),
        fair.bound("busy", "calm"),
        late[0] - arrived,
        (run.begun[late[0]].at_us - LATE_US) / 1e6,
        share_of("late", services[arrived], services[late[-1]]),
    )
