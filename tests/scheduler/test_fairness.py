"""Fair shares beside a plain model of them, and the bound on how far two tenants differ."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate.ipc.protocol import RequestId
from tidegate.scheduler.fairness import (
    IDLE_LINE_COUNT_MAX,
    STALE_COUNT_MIN,
    Account,
    FairShares,
)

WEIGHTS = {"a": 1.0, "b": 4.0, "c": 0.5}
TENANTS = st.sampled_from(["a", "b", "c", "d"])


def names(shares: FairShares, limit: int = 10) -> list[str]:
    """The order in which requests are looked at, the first of all included."""
    first = shares.first()
    return [] if first is None else [first[1], *shares.behind(limit)]


class Bench:
    """Shares, and the accounts of those that were put in, by name."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.shares = FairShares(weights or {})
        self.accounts: dict[str, Account] = {}

    def wait(self, *requests: str, priority: int = 0) -> None:
        """Names begin with their tenant's letter."""
        for name in requests:
            account = self.shares.open(priority, name[0])
            self.shares.wait(account, RequestId(name), len(self.accounts))
            self.accounts[name] = account

    def begin(self, name: str, computed: int) -> None:
        self.shares.begin(self.accounts[name], RequestId(name), computed)
        self.shares.check()

    def clock(self, name: str) -> float:
        return self.accounts[name].line.clock


# --- Whose turn it is ---


def test_of_one_tenant_the_first_that_came_is_next() -> None:
    bench = Bench()
    bench.wait("a1", "a2", "a3")
    assert names(bench.shares) == ["a1", "a2", "a3"]


def test_a_tenant_that_was_charged_less_is_next() -> None:
    bench = Bench()
    bench.wait("a1", "a2", "b1", "b2", "b3")
    bench.begin("a1", 100)
    bench.begin("b1", 60)
    assert bench.shares.first() == (0, "b2")
    bench.begin("b2", 60)
    assert bench.shares.first() == (0, "a2")


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much() -> None:
    bench = Bench({"b": 2.0})
    bench.wait(*(f"{tenant}{index}" for tenant in "ab" for index in range(30)))
    served = {"a": 0, "b": 0}
    for _ in range(30):
        first = bench.shares.first()
        assert first is not None
        bench.begin(first[1], 10)
        served[first[1][0]] += 1
    assert served == {"a": 10, "b": 20}


def test_a_higher_priority_goes_first_whatever_its_tenant_was_charged() -> None:
    bench = Bench()
    bench.wait("b1")
    bench.wait("a1", "a2", priority=1)
    bench.begin("a1", 10_000)
    assert bench.shares.first() == (1, "a2")
    bench.begin("a2", 10)
    assert bench.shares.first() == (0, "b1")


def test_what_a_tenant_is_charged_counts_within_that_priority_only() -> None:
    bench = Bench()
    bench.wait("a1", priority=1)
    bench.begin("a1", 10_000)
    bench.wait("a2", "b1")
    assert bench.shares.first() == (0, "a2")


def test_sampled_tokens_are_charged_when_they_are_settled() -> None:
    bench = Bench()
    bench.wait("a1", "b1", "b2", "a2")
    bench.begin("a1", 10)
    bench.begin("b1", 20)
    assert bench.shares.first() == (0, "a2")
    bench.accounts["a1"].settle(3)
    bench.accounts["a1"].settle(3)
    assert bench.clock("a1") == 10 + 4 * 3
    assert bench.shares.first() == (0, "b2")


def test_those_behind_the_first_are_each_lines_next_and_then_each_lines_second() -> None:
    bench = Bench()
    bench.wait("a1", "a2", "a3", "b1", "b2", "c1")
    assert names(bench.shares) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert bench.shares.behind(2) == ["b1", "c1"]
    bench.wait("a4", priority=-1)  # Of another priority: never behind this one.
    assert names(bench.shares) == ["a1", "b1", "c1", "a2", "b2", "a3"]


# --- Credit and debt ---


def test_a_tenant_that_comes_back_has_saved_up_no_credit() -> None:
    bench = Bench()
    bench.wait("b1")
    bench.begin("b1", 10)
    bench.wait("a1", "a2", "a3")
    bench.begin("a1", 1000)
    bench.begin("a2", 1000)
    bench.wait("b2", "b3")
    assert bench.clock("b2") == bench.clock("a3") == 2000
    assert bench.shares.first() == (0, "a3")  # It came earlier.


def test_without_others_that_wait_it_begins_where_the_last_one_was_when_it_was_served() -> None:
    bench = Bench()
    bench.wait("a1")
    bench.begin("a1", 5000)
    bench.wait("a2")
    bench.begin("a2", 7)
    bench.wait("b1", "a3")
    assert bench.clock("b1") == 5000 and bench.clock("a3") == 5007


def test_a_tenant_that_was_ahead_when_it_left_is_so_when_it_comes_back() -> None:
    bench = Bench()
    bench.wait("a1", "b1", "b2")
    bench.begin("a1", 1000)
    bench.shares.end(bench.accounts["a1"], 0, 0)
    bench.wait("a2")
    assert bench.clock("a2") == 1000 and bench.clock("b1") == 0


# --- Refunds ---


def test_what_is_computed_again_is_paid_for_once() -> None:
    bench = Bench()
    bench.wait("a1")
    account = bench.accounts["a1"]
    bench.begin("a1", 100)
    bench.shares.give_way(account, 10)
    assert account.charged == 4 * 10 - 10
    bench.shares.begin_anew(account, 110, 10)
    assert account.charged == 100 + 4 * 10
    bench.shares.give_way(account, 15)
    bench.shares.begin_anew(account, 20, 15)  # Most of it was cached by then.
    bench.shares.end(account, 16, 0)
    assert account.charged == 100 + 4 * 16 == bench.clock("a1")


def test_a_refund_brings_the_tenant_forward_at_once() -> None:
    bench = Bench()
    bench.wait("a1", "b1", "b2", "a2")
    bench.begin("a1", 100)
    bench.begin("b1", 50)
    assert bench.shares.first() == (0, "b2")
    bench.shares.give_way(bench.accounts["a1"], 0)
    assert bench.shares.first() == (0, "a2")
    bench.shares.check()


def test_a_request_that_ends_before_it_begins_anew_has_paid_for_what_it_had() -> None:
    bench = Bench()
    bench.wait("a1")
    bench.begin("a1", 100)
    bench.shares.give_way(bench.accounts["a1"], 10)
    bench.shares.end(bench.accounts["a1"], 10, 0)
    assert bench.accounts["a1"].charged == 100 + 4 * 10


def test_positions_that_never_ran_are_given_back() -> None:
    bench = Bench()
    bench.wait("a1", "a2")
    bench.begin("a1", 100)
    bench.shares.end(bench.accounts["a1"], 0, 70)
    assert bench.clock("a2") == 30


# --- Bounds of what is remembered ---


def test_tenants_that_are_gone_are_forgotten_beyond_a_bound() -> None:
    bench = Bench()
    bench.wait("z")  # Somebody waits all the time, so that nobody else is let forward.
    for number in range(3 * IDLE_LINE_COUNT_MAX):
        account = bench.shares.open(0, f"tenant {number}")
        bench.shares.wait(account, RequestId("r"), 1 + number)
        bench.shares.begin(account, RequestId("r"), 10)
        bench.shares.end(account, 1, 0)
    assert len(bench.shares._idle) == IDLE_LINE_COUNT_MAX  # pyright: ignore[reportPrivateUsage] # It is what is bounded.
    bench.shares.check()


def test_priorities_that_nobody_uses_any_more_are_forgotten() -> None:
    bench = Bench()
    bench.wait("z", priority=1_000_000)
    for priority in range(10_000):
        account = bench.shares.open(priority, "a")
        bench.shares.wait(account, RequestId("r"), 1 + priority)
        bench.shares.leave(account, RequestId("r"))
    assert len(bench.shares._classes) == 1  # pyright: ignore[reportPrivateUsage] # It is what is bounded.
    assert len(bench.shares._priorities) <= STALE_COUNT_MIN + 4  # pyright: ignore[reportPrivateUsage] # It is what is bounded.


# --- Beside a plain model ---


class PlainLine:
    """A line as the documents describe it, with exact numbers and nothing but lists."""

    def __init__(self, weight: float) -> None:
        self.weight = Fraction(weight)
        self.clock = Fraction(0)
        self.waiting: list[int] = []

    def pay(self, tokens: int) -> None:
        self.clock += tokens / self.weight


class Begun:
    """A request that has begun: what it has paid for positions, and its tokens."""

    def __init__(self, number: int, key: tuple[int, str], paid: int) -> None:
        self.number = number
        self.key = key
        self.paid = paid
        self.tokens = 0
        self.waits = False


class SharesMachine(RuleBasedStateMachine):
    """Weights are powers of two, so that the clocks of both are exactly the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = FairShares(WEIGHTS)
        self.accounts: list[Account] = []
        self.lines: dict[tuple[int, str], PlainLine] = {}
        self.reached: dict[int, Fraction] = {}
        self.begun: list[Begun] = []

    def ordered(self, priority: int) -> list[PlainLine]:
        lines = [line for (p, _), line in self.lines.items() if p == priority and line.waiting]
        return sorted(lines, key=lambda line: (line.clock, line.waiting[0]))

    def entry_clock(self, priority: int) -> Fraction:
        lines = self.ordered(priority)
        return lines[0].clock if lines else self.reached.get(priority, Fraction(0))

    def forget(self, key: tuple[int, str]) -> None:
        """Nothing is remembered of a line that is not ahead, and has no request."""
        line = self.lines[key]
        if line.waiting or any(one.key == key for one in self.begun):
            return
        if line.clock <= self.entry_clock(key[0]):
            del self.lines[key]
            if not any(priority == key[0] for priority, _ in self.lines):
                self.reached.pop(key[0], None)

    @rule(tenant=TENANTS, priority=st.integers(0, 1))
    def wait(self, tenant: str, priority: int) -> None:
        key, number = (priority, tenant), len(self.accounts)
        line = self.lines.setdefault(key, PlainLine(WEIGHTS.get(tenant, 1.0)))
        if not line.waiting:
            line.clock = max(line.clock, self.entry_clock(priority))
        line.waiting.append(number)
        self.accounts.append(self.shares.open(priority, tenant))
        self.shares.wait(self.accounts[-1], RequestId(str(number)), number)

    def keys(self) -> dict[int, tuple[int, str]]:
        return {number: key for key, line in self.lines.items() for number in line.waiting}

    @precondition(lambda self: bool(self.keys()))
    @rule(place=st.integers(0, 3), computed=st.integers(1, 50))
    def begin(self, place: int, computed: int) -> None:
        first = self.shares.first()
        assert first is not None
        waiting = [first[1], *self.shares.behind(3)]
        number = int(waiting[place % len(waiting)])
        key = self.keys()[number]
        least = self.ordered(key[0])[0].clock
        self.reached[key[0]] = max(least, self.reached.get(key[0], Fraction(0)))
        self.lines[key].waiting.remove(number)
        self.lines[key].pay(computed)
        self.begun.append(Begun(number, key, computed))
        self.shares.begin(self.accounts[number], RequestId(str(number)), computed)

    @precondition(lambda self: bool(self.keys()))
    @rule(index=st.integers(0, 20))
    def leave(self, index: int) -> None:
        keys = self.keys()
        number = sorted(keys)[index % len(keys)]
        self.lines[keys[number]].waiting.remove(number)
        self.forget(keys[number])
        self.shares.leave(self.accounts[number], RequestId(str(number)))

    def running(self, index: int) -> Begun | None:
        running = [one for one in self.begun if not one.waits]
        return running[index % len(running)] if running else None

    @rule(index=st.integers(0, 20), tokens=st.integers(1, 9))
    def sample(self, index: int, tokens: int) -> None:
        one = self.running(index)
        if one is not None:
            one.tokens += tokens
            self.lines[one.key].pay(4 * tokens)
            self.accounts[one.number].settle(one.tokens)

    @rule(index=st.integers(0, 20), tokens=st.integers(0, 9))
    def give_way(self, index: int, tokens: int) -> None:
        one = self.running(index)
        if one is not None:
            # Every token that it has brought is part of what it computes again.
            one.tokens += tokens
            one.waits = True
            self.lines[one.key].pay(4 * tokens - one.paid - one.tokens)
            self.shares.give_way(self.accounts[one.number], one.tokens)

    @rule(index=st.integers(0, 20), cached=st.integers(0, 60))
    def begin_anew(self, index: int, cached: int) -> None:
        waiting = [one for one in self.begun if one.waits]
        if waiting:
            one = waiting[index % len(waiting)]
            one.waits = False
            computed = max(1, one.paid + one.tokens - cached)
            self.lines[one.key].pay(one.paid + one.tokens)
            self.shares.begin_anew(self.accounts[one.number], computed, one.tokens)

    @rule(index=st.integers(0, 20), tokens=st.integers(0, 9))
    def end(self, index: int, tokens: int) -> None:
        if self.begun:
            one = self.begun.pop(index % len(self.begun))
            if one.waits:
                tokens = 0
                self.lines[one.key].pay(one.paid + one.tokens)
            one.tokens += tokens
            self.lines[one.key].pay(4 * tokens)
            self.shares.end(self.accounts[one.number], one.tokens, 0)
            assert self.accounts[one.number].charged == one.paid + 4 * one.tokens
            self.forget(one.key)

    @invariant()
    def the_same_request_is_next(self) -> None:
        self.shares.check()
        priorities = {priority for (priority, _), line in self.lines.items() if line.waiting}
        if not priorities:
            assert self.shares.first() is None
            return
        lines = self.ordered(max(priorities))
        assert self.shares.first() == (max(priorities), str(lines[0].waiting[0]))
        heads = [str(line.waiting[0]) for line in lines]
        assert self.shares.behind(len(heads) - 1) == heads[1:]
        assert [line.clock for line in self.shares.lines()] == [
            self.lines[line.priority, line.tenant].clock for line in self.shares.lines()
        ]


SharesMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, derandomize=True
)
TestShares = SharesMachine.TestCase


# --- The bound ---


class Job:
    """A request of the bound's test, with what it is to cost, and what of it was delivered."""

    def __init__(self, number: int, tenant: str, computed: int, output: int) -> None:
        self.name = RequestId(str(number))
        self.number = number
        self.tenant = tenant
        self.computed = computed
        self.output = output
        self.tokens = 0

    @property
    def cost(self) -> int:
        return self.computed + 4 * self.output


SIZES = st.tuples(st.integers(1, 60), st.integers(1, 20))


@pytest.mark.parametrize("settles", [True, False], ids=["at once", "late"])
@given(
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([1.0, 2.0])),
    sizes=st.tuples(
        st.lists(SIZES, min_size=1, max_size=4), st.lists(SIZES, min_size=1, max_size=4)
    ),
    rows=st.integers(1, 8),
    flood=st.integers(1, 60),
    steps=st.lists(st.integers(0, 99), min_size=1, max_size=200),
)
@example(
    weights=(1.0, 1.0), sizes=([(9, 1)], [(9, 1)]), rows=2, flood=60, steps=list(range(1, 80))
)
@settings(max_examples=100, deadline=None)
def test_two_tenants_that_both_wait_never_differ_by_more_than_the_bound(
    settles: bool,
    weights: tuple[float, float],
    sizes: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    rows: int,
    flood: int,
    steps: list[int],
) -> None:
    """Whatever the sizes, the order of tokens, and who gives way when.

    The first tenant has `flood` requests in the queue before the other one has any.

    Service is what was delivered: a prompt when it begins, and tokens when they are sampled,
    charged at once or only at the end. The bound is the most that a tenant's requests which
    had begun and not ended at some time could cost.
    """
    weight = dict(zip("ab", weights, strict=True))
    shares = FairShares(weight)
    accounts: dict[str, Account] = {}
    jobs: list[Job] = []
    running: list[Job] = []
    waiting: list[Job] = []  # To begin anew.
    service = {"a": Fraction(0), "b": Fraction(0)}
    bounds = {"a": Fraction(0), "b": Fraction(0)}

    def arrive(index: int) -> None:
        tenant = "ab"[index]
        count = sum(job.tenant == tenant for job in jobs)
        computed, output = sizes[index][count % len(sizes[index])]
        jobs.append(Job(len(jobs), tenant, computed, output))
        accounts[jobs[-1].name] = shares.open(0, tenant)
        shares.wait(accounts[jobs[-1].name], jobs[-1].name, jobs[-1].number)

    def fill() -> None:
        while waiting and len(running) < rows:
            job = waiting.pop(0)
            shares.begin_anew(accounts[job.name], job.computed + job.tokens, job.tokens)
            running.append(job)
        while len(running) < rows:
            first = shares.first()
            assert first is not None
            job = jobs[int(first[1])]
            arrive("ab".index(job.tenant))  # There is always another one that waits.
            shares.begin(accounts[job.name], job.name, job.computed)
            running.append(job)
            service[job.tenant] += job.computed
            check()

    def check() -> None:
        for tenant in "ab":
            begun = sum(job.cost for job in [*running, *waiting] if job.tenant == tenant)
            bounds[tenant] = max(bounds[tenant], begun / Fraction(weight[tenant]))
        a, b = (service[tenant] / Fraction(weight[tenant]) for tenant in "ab")
        assert -bounds["b"] <= a - b <= bounds["a"]

    for _ in range(flood):
        arrive(0)
    arrive(1)
    for step in steps:
        fill()
        job = running[step % len(running)]
        if step % 9 == 0:
            running.remove(job)
            waiting.append(job)
            shares.give_way(accounts[job.name], job.tokens)
            continue
        job.tokens += 1
        service[job.tenant] += 4
        if settles:
            accounts[job.name].settle(job.tokens)
        check()
        if job.tokens == job.output:
            running.remove(job)
            shares.end(accounts[job.name], job.tokens, 0)
