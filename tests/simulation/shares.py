"""What each tenant was given, counted from the outside, and whether that was its share.

Service is a request's computed prompt when it begins, and each token that it brings. What it
computes again after it gave way is no service. Only what the log and the clients are told is
used, and nothing of the core's own accounts.
"""

from fractions import Fraction

import msgspec

from simulation.memory import SimulationError
from simulation.scripts import Script

TOKEN_COST = 4  # Of a sampled token; a computed position of a prompt is 1.

Key = tuple[int, str]  # Priority and tenant.


class Begun(msgspec.Struct):
    """A request that has begun. `paid` are the positions that were service when they ran."""

    key: Key
    cost: int  # What it may come to in all.
    paid: int = 0
    token_count: int = 0


class Account(msgspec.Struct):
    """One tenant's requests of one priority. Amounts are divided by its weight."""

    weight: Fraction
    waiting: dict[str, None] = msgspec.field(default_factory=dict[str, None])  # In order.
    service: Fraction = Fraction(0)
    begun_cost: Fraction = Fraction(0)  # Of those that have begun and not ended.
    begun_cost_max: Fraction = Fraction(0)

    def begin(self, cost: int) -> None:
        self.begun_cost += cost / self.weight
        self.begun_cost_max = max(self.begun_cost_max, self.begun_cost)


class Shares:
    """Raises `SimulationError` when two tenants that both wait differ by more than they may,
    or a request is passed by more than may pass it.

    `pass_count_max` requests may pass one that waits for pages, and come to `pass_tokens_max`
    together, by which their tenant may be ahead.
    """

    def __init__(
        self, weights: dict[str, float], pass_count_max: int, pass_tokens_max: int
    ) -> None:
        self.accounts: dict[Key, Account] = {}
        self.most = Fraction(0)  # The largest difference, as a share of what it may be.
        self._weights = weights
        self._pass_count_max = pass_count_max
        self._pass_tokens_max = pass_tokens_max
        self._slack = pass_tokens_max if pass_count_max else 0
        self._passes: dict[str, tuple[int, int]] = {}  # How many, and what they may come to.
        self.pass_count = 0
        self._begun: dict[str, Begun] = {}
        self._waiting: dict[str, tuple[Key, int]] = {}
        # Differences when both began to wait.
        self._since: dict[tuple[Key, Key], Fraction] = {}

    def accept(self, script: Script, max_tokens: int) -> None:
        key = (script.priority, script.tenant)
        account = self.accounts.get(key)
        if account is None:
            weight = Fraction(self._weights.get(script.tenant, 1.0))
            account = self.accounts[key] = Account(weight)
        account.waiting[script.request_id] = None
        cost = script.prompt_tokens + TOKEN_COST * max_tokens
        self._waiting[script.request_id] = (key, cost)
        if len(account.waiting) == 1:
            for other, theirs in self.accounts.items():
                if other != key and other[0] == key[0] and theirs.waiting:
                    self._since[key, other] = account.service - theirs.service

    def begin(
        self, script: Script, output_tokens: int, cached_tokens: int, passed: str | None
    ) -> None:
        """It is admitted, for the first time or anew, and perhaps passes another."""
        name = script.request_id
        begun = self._begun.get(name)
        if passed is not None:
            self._pass(name, passed)
        elif begun is None:
            self._check_turn(name)
        if begun is None:
            key, cost = self._waiting[name]
            self._stop_waiting(name)
            begun = self._begun[name] = Begun(key, cost)
            self.accounts[key].begin(cost)
        computed = script.prompt_tokens + output_tokens - cached_tokens
        new = max(0, computed - begun.paid - output_tokens)
        begun.paid += new
        self._serve(begun, new)

    def emit(self, name: str, token_count: int) -> None:
        begun = self._begun[name]
        begun.token_count += token_count
        self._serve(begun, TOKEN_COST * token_count)

    def finish(self, name: str, charged_tokens: int) -> None:
        begun = self._begun.pop(name, None)
        if begun is None:
            if charged_tokens:
                raise SimulationError(f"request {name} pays, and never began")
            self._stop_waiting(name)
            return
        account = self.accounts[begun.key]
        # Positions that never ran are given back.
        given_back = begun.paid + TOKEN_COST * begun.token_count - charged_tokens
        if not 0 <= given_back <= begun.paid or (given_back and begun.token_count):
            raise SimulationError(f"request {name} pays {charged_tokens}, which is wrong")
        account.service -= given_back / account.weight
        account.begun_cost -= begun.cost / account.weight

    def _pass(self, name: str, head: str) -> None:
        if name not in self._waiting or head not in self._waiting:
            raise SimulationError(f"{name} passes {head}, and one of them has begun before")
        (mine, cost), (theirs, _) = self._waiting[name], self._waiting[head]
        if mine[0] != theirs[0]:
            raise SimulationError(f"{name} passes {head}, which has another priority")
        count, tokens = self._passes.get(head, (0, 0))
        self._passes[head] = count + 1, tokens + cost
        if count + 1 > self._pass_count_max or tokens + cost > self._pass_tokens_max:
            raise SimulationError(f"{head} is passed by too many")
        self.pass_count += 1

    def _check_turn(self, name: str) -> None:
        """Who begins and passes nobody is its tenant's first, and of the highest priority."""
        key, _ = self._waiting[name]
        if next(iter(self.accounts[key].waiting)) != name:
            raise SimulationError(f"{name} begins before an earlier one of its tenant's")
        if any(other[0] > key[0] and theirs.waiting for other, theirs in self.accounts.items()):
            raise SimulationError(f"{name} begins before one of a higher priority")

    def _stop_waiting(self, name: str) -> None:
        key, _ = self._waiting.pop(name)
        account = self.accounts[key]
        del account.waiting[name]
        if not account.waiting:
            self._since = {pair: at for pair, at in self._since.items() if key not in pair}

    def _serve(self, begun: Begun, tokens: int) -> None:
        self.accounts[begun.key].service += tokens / self.accounts[begun.key].weight
        for (mine, theirs), since in self._since.items():
            one, other = self.accounts[mine], self.accounts[theirs]
            bound = 2 * (self._slack + one.begun_cost_max + other.begun_cost_max)
            difference = abs(one.service - other.service - since)
            if bound:
                self.most = max(self.most, difference / bound)
            if difference > bound:
                raise SimulationError(f"{mine} and {theirs} differ by {float(difference):.0f}")
