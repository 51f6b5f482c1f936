"""Bugs in who is served next, what is charged, and when a request is given up."""

from mutants.mutant import BySeed, ByTest, Mutant
from simulation.crowds import CROWD_SEED_MIN

FAIRNESS = ByTest("scheduler/test_fairness.py")
TENANTS = ByTest("scheduler/test_tenants.py")
BYPASS = ByTest("scheduler/test_bypass.py")
OVERLOAD = ByTest("scheduler/test_overload.py")
DEADLINES = ByTest("scheduler/test_deadlines.py")

OF_SHARES = (
    Mutant(
        "requests are served in the order of arrival, whoever sent them",
        "scheduler/fairness.py",
        "return self.clock, next(iter(self.waiting.values()))",
        "return 0.0, next(iter(self.waiting.values()))",
        FAIRNESS,
    ),
    Mutant(
        "a tenant that was away has saved up credit",
        "scheduler/fairness.py",
        "line.clock = max(line.clock, lines.entry_clock)",
        "pass",
        FAIRNESS,
    ),
    Mutant(
        "a weight makes a tenant's requests dearer",
        "scheduler/fairness.py",
        "self.line.clock += tokens / self.line.weight",
        "self.line.clock += tokens * self.line.weight",
        FAIRNESS,
    ),
    Mutant(
        "what is computed again is paid for again",
        "scheduler/fairness.py",
        "self.pay(-self._refunded)",
        "pass",
        FAIRNESS,
    ),
    Mutant(
        "a clock that was put back is not found",
        "scheduler/fairness.py",
        "account.refund()\n        self._class(account.line.priority).touch(account.line)",
        "account.refund()",
        FAIRNESS,
    ),
    Mutant(
        "cached tokens are charged",
        "scheduler/fleet.py",
        "computed = Tokens(seat.lengths.prompt - seat.holding.cached_tokens)",
        "computed = Tokens(seat.lengths.prompt)",
        TENANTS,
    ),
    Mutant(
        "tokens are charged only when their request ends",
        "scheduler/reports.py",
        "        seat.request.account.settle(seat.request.output_count)\n",
        "",
        TENANTS,
    ),
    Mutant(
        "a rank is that of the arrival",
        "scheduler/fleet.py",
        "request.rank = (-request.priority, self.next_rank)",
        "request.rank = (-request.priority, request.number)",
        TENANTS,
    ),
    Mutant(
        "who gave way waits behind those that have not begun",
        "scheduler/queues.py",
        "if first is None or -negated >= first[0]:",
        "if first is None or -negated > first[0]:",
        TENANTS,
    ),
    Mutant(
        "a request that waits for pages is passed by one more than may",
        "scheduler/bypass.py",
        "head.passed_count < settings.bypass_count_max\n        and",
        "head.passed_count <= settings.bypass_count_max\n        and",
        BySeed(CROWD_SEED_MIN),
    ),
    Mutant(
        "what passes a request is not added up",
        "scheduler/bypass.py",
        "head.passed_tokens += cost_of(request)",
        "head.passed_tokens = cost_of(request)",
        BySeed(CROWD_SEED_MIN),
    ),
    Mutant(
        "how many may pass a request has no bound",
        "scheduler/bypass.py",
        "head.passed_count += 1",
        "head.passed_count += 0",
        BySeed(CROWD_SEED_MIN),
    ),
    Mutant(
        "the log does not tell that one has passed another",
        "scheduler/placement.py",
        "_begin(fleet, request, seat, now_us, passed=head.request_id)",
        "_begin(fleet, request, seat, now_us)",
        BySeed(CROWD_SEED_MIN),
    ),
    Mutant(
        "one of a lower priority passes",
        "scheduler/fairness.py",
        "lines = self._class(first[0]).first_lines(limit + 1)",
        "lines = self._class(min(self._classes)).first_lines(limit + 1)",
        BySeed(CROWD_SEED_MIN),
    ),
    Mutant(
        "a tenant far ahead passes others",
        "scheduler/bypass.py",
        "and ahead <= settings.bypass_tokens_max",
        "and ahead <= float('inf')",
        BYPASS,
    ),
    Mutant(
        "a request that gave way is passed",
        "scheduler/bypass.py",
        "if head.account.has_begun or head.passed_count",
        "if head.passed_count",
        BYPASS,
    ),
    Mutant(
        "a tenant may fill the queue",
        "scheduler/overload.py",
        "load = queue.loads.get(tenant)",
        "load = None",
        BySeed(),
    ),
    Mutant(
        "a prompt larger than the bound is refused on an idle fleet",
        "scheduler/overload.py",
        "if load.count and tokens_max is not None",
        "if tokens_max is not None",
        OVERLOAD,
    ),
    Mutant(
        "a tenant without requests is still counted",
        "scheduler/queues.py",
        "            self._weight -= weight_of(self._weights, tenant)\n",
        "",
        OVERLOAD,
    ),
    Mutant(
        "a deadline in all ends with the first token",
        "scheduler/deadlines.py",
        "    if request.total_due_us is not None:\n        dues",
        "    if request.total_due_us is not None and not request.output_count:\n        dues",
        BySeed(),
    ),
    Mutant(
        "the first token's deadline holds after it",
        "scheduler/state.py",
        "return self._first_token_due_us if self.times.first_token_us is None else None",
        "return self._first_token_due_us",
        BySeed(),
    ),
    Mutant(
        "a prompt that cannot be in time is begun",
        "scheduler/deadlines.py",
        "    if not needed_us or now_us + min(needed_us) < own.us:",
        "    if not needed_us or now_us < own.us:",
        DEADLINES,
    ),
    Mutant(
        "a prompt is given up at the speed that was measured",
        "scheduler/prefill_speed.py",
        "MARGIN = 2",
        "MARGIN = 1",
        DEADLINES,
    ),
)
